// SPDX-License-Identifier: Apache-2.0
//! What `--memory` can say, in real guests: each backing, each kind of page and each way to make it ready; and a pool that
//! never shows one guest what another wrote, whoever is killed when.

use std::path::{Path, PathBuf};

use serde_json::Value;
use testkit::Code;

use crate::lab::script;

/// `stock NAME MEMORY` and `tiny NAME MEMORY`: a guest that says what its memory holds once it has written to it, and what the
/// ledger says of it.
const WEIGHED: &str = r#"
SUM='mount -t tmpfs t /mnt;yes tare | head -c 24000000 >/mnt/f;md5sum </mnt/f'
weighed() {
    echo "== ledger $1"
    cat /lab/ledger
    rm -f /lab/ledger
}
stock() {
    echo "== $1"
    MEMORY=$2 guest "$SUM;$OFF" --ledger /lab/ledger 2>&1
    weighed $1
}
tiny() {
    echo "== $1"
    tare run --kernel /lab/checker --memory $2 --console serial --ledger /lab/ledger </dev/null 2>&1
    echo "status $?"
    weighed $1
}
echo "== right"
yes tare | head -c 24000000 | md5sum
"#;

/// A guest that is a stock kernel, or one that writes to all of its memory from 32 MiB on and looks at it again.
const STOCK: bool = true;
const TINY: bool = false;

/// Name, which guest, `--memory`, what the ledger calls the way, MiB of it that are ready, and whether all of it is in huge
/// pages by the end or none.
type Case = (&'static str, bool, &'static str, &'static str, u64, Option<bool>);
const CASES: [Case; 7] = [
    ("thp", STOCK, "256M,prealloc=parallel", "parallel", 256, Some(true)),
    ("huge", STOCK, "256M,backing=memfd,pages=2M,prealloc=vcpu", "vcpu", 256, Some(true)),
    ("file", STOCK, "256M,backing=file,path=/lab/ram,pages=4K,prealloc=populate", "populate", 256, Some(false)),
    ("small", TINY, "96M,pages=4K,prealloc=touch", "touch", 96, Some(false)),
    ("private", TINY, "96M,backing=memfd,shared=off,pages=4K,prealloc=populate", "populate", 96, Some(false)),
    (
        "hugetlbfs",
        TINY,
        "96M,backing=file,path=/lab/huge,prealloc=parallel,prealloc-threads=3",
        "parallel",
        96,
        Some(true),
    ),
    ("shared", TINY, "96M,backing=memfd", "off", 0, None),
];

#[test]
#[ignore = "needs the lab: make e2e"]
fn each_kind_of_memory_holds_what_the_guest_wrote() {
    let mut text = WEIGHED.to_owned();
    text += "echo 144 >/proc/sys/vm/nr_hugepages\nmkdir /lab/huge\nmount -t hugetlbfs h /lab/huge\n";
    for (name, is_stock, memory, ..) in CASES {
        text += &format!("{} {name} {memory}\n", if is_stock { "stock" } else { "tiny" });
    }
    text += r#"
umount /lab/huge
echo "== left"
grep HugePages_Free /proc/meminfo
echo "== too few"
refused --kernel /lab/vmlinuz --memory 512M,pages=2M
tiny fallback 512M,pages=2M,fallback=on,prealloc=parallel
echo "== gigantic"
echo 0 >/proc/sys/vm/nr_hugepages
echo 1 >/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages
cat /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages
tiny 1G 1G,pages=1G,prealloc=touch
"#;
    let Ok(folder) = tempfile::tempdir() else { panic!("no room for a temporary folder") };
    let printed = script(&text, &[kernel(folder.path(), "checker", "/lab/checker", &checker())]);
    let right = printed.part("right");
    let guest = |name: &str, is_stock: bool| {
        let part = printed.part(name);
        let holds = if is_stock { right } else { "as written\n" };
        assert!(part.contains(holds) && part.contains("status 0"), "{name}: {printed:#?}");
        let ledger: Value = serde_json::from_str(printed.part(&format!("ledger {name}"))).expect("the ledger is JSON");
        ledger
    };
    let mib = |ledger: &Value, at: &str| ledger.pointer(at).and_then(Value::as_u64).unwrap_or(u64::MAX) >> 20;
    for (name, is_stock, memory, way, ready, huge) in CASES {
        let ledger = guest(name, is_stock);
        assert_eq!(ledger["startup"]["prealloc"], way, "{name}");
        assert_eq!(mib(&ledger, "/startup/ready"), ready, "{name}");
        let size = if memory.starts_with("256M") { 256 } else { 96 };
        let (rss, in_huge) = (mib(&ledger, "/memory/guest_rss"), mib(&ledger, "/memory/guest_huge"));
        assert!(rss >= 24 && rss >= ready && rss <= size, "{name}: {rss} MiB");
        match huge {
            Some(true) => assert_eq!(in_huge, size, "{name}"),
            Some(false) => assert_eq!(in_huge, 0, "{name}"),
            None => {}
        }
    }
    assert!(printed.part("left").contains(" 144\n"), "huge pages come back: {printed:#?}");
    let few = printed.part("too few");
    assert!(few.contains("the guest needs 256 pages of 2M and 144 are free: memory.pages"), "{few}");
    assert!(few.contains("nr_hugepages, or add fallback=on") && few.contains("status 3"), "{few}");
    let ledger = guest("fallback", TINY);
    assert!(printed.part("fallback").contains("going on with memory in transparent huge pages"), "{printed:#?}");
    assert_eq!(mib(&ledger, "/startup/ready"), 512);
    if printed.part("gigantic").trim() == "1" {
        let ledger = guest("1G", TINY);
        assert_eq!((mib(&ledger, "/startup/ready"), mib(&ledger, "/memory/guest_huge")), (1024, 1024));
    } else {
        println!("skipped: the lab's kernel found no GiB of memory in one piece");
    }
}

/// Bytes of guest memory in the tests of the pool: all that the pool has.
const POOLED: u32 = 96 << 20;
/// From here on nobody but the guest writes.
const FREE: u32 = 32 << 20;

/// `code` as a kernel.
fn elf(code: &Code) -> Vec<u8> {
    code.elf(16 << 20)
}

/// Writes a pattern all over its memory, says `filled`, and ends or sleeps.
fn filler(off: bool) -> Vec<u8> {
    let mut code = Code::new();
    // mov rax, pattern; mov edi, FREE; mov ecx, words; cld; rep stosq
    code.bytes(&[0x48, 0xb8]).bytes(&0x7365_6372_6574_2121u64.to_le_bytes());
    all_words(&mut code).bytes(&[0xfc, 0xf3, 0x48, 0xab]).say("filled\n");
    if off {
        code.power_off();
    }
    elf(code.halt())
}

/// mov edi, FREE; mov ecx, words
fn all_words(code: &mut Code) -> &mut Code {
    code.bytes(&[0xbf]).bytes(&FREE.to_le_bytes()).bytes(&[0xb9]).bytes(&((POOLED - FREE) / 8).to_le_bytes())
}

/// Compares all words with a register, by the code of `cmp [rdi], register`: says `same`, or `other`.
fn compare<'a>(code: &'a mut Code, register: u8, same: &str, other: &str) -> &'a mut Code {
    let mut fine = Code::new();
    let fine = fine.say(same).power_off().halt().as_bytes();
    // L: cmp [rdi], register; jne other; add rdi, 8; dec ecx; jnz L
    let step = [0x48, 0x39, register, 0x75, 8 + fine.len() as u8, 0x48, 0x83, 0xc7, 8, 0xff, 0xc9, 0x75, 0xf3];
    all_words(code).bytes(&step).bytes(fine).say(other).power_off().halt()
}

/// Looks at all of its memory, and says whether it was as new.
fn searcher() -> Vec<u8> {
    // xor eax, eax, which [rdi] is then compared with
    elf(compare(Code::new().bytes(&[0x31, 0xc0]), 0x07, "all zero\n", "somebody's\n"))
}

/// Writes each word's address to it, and says whether all of them are there then.
fn checker() -> Vec<u8> {
    let mut code = Code::new();
    // L: mov [rdi], rdi; add rdi, 8; dec ecx; jnz L
    all_words(&mut code).bytes(&[0x48, 0x89, 0x3f, 0x48, 0x83, 0xc7, 8, 0xff, 0xc9, 0x75, 0xf5]);
    elf(compare(&mut code, 0x3f, "as written\n", "otherwise\n"))
}

/// A kernel, written into `folder`, and where the lab machine has it.
fn kernel(folder: &Path, name: &str, there: &'static str, bytes: &[u8]) -> (PathBuf, &'static str) {
    let here = folder.join(name);
    assert!(std::fs::write(&here, bytes).is_ok(), "{}", here.display());
    (here, there)
}

const POOL: &str = r#"
start_pool() {
    tare memory-pool --socket /lab/pool --size 96M --piece 16M --threads 1 2>>/lab/pool.said &
    pool=$!
}
# tiny KERNEL: a guest that has all that the pool has.
tiny() { exec tare run --kernel /lab/$1 --memory 96M,prealloc=pool,pool=/lab/pool --console serial </dev/null 2>&1; }
# searched: what a guest finds that has all of the pool's memory, once the pool has it again.
searched() {
    for _ in $(seq 400); do
        found=$(tiny searcher)
        case $found in
            *"MiB free, the guest needs"* | *"no memory pool answers"*) sleep 0.05 ;;
            *) echo "$found"; return ;;
        esac
    done
    echo "never: $found"
}
shmem() { awk '$1 == "Shmem:" { print int($2 / 1024) }' /proc/meminfo; }
before=$(shmem)
echo "== ends"
start_pool
searched
for _ in 1 2; do
    tiny filler >/lab/out &
    wait $!
    cat /lab/out
    searched
done
echo "== machines killed"
for delay in 0 0.003 0.01 0.02 0.05 0.3; do
    tiny sleeper >/lab/out &
    sleep $delay
    kill -9 $!
    wait $! 2>/dev/null
    searched
done
grep -c filled /lab/out
kill -9 $pool
wait $pool 2>/dev/null
echo "== pools killed"
for delay in 0 0.001 0.003 0.006 0.01 0.03; do
    start_pool
    searched >/dev/null
    tiny filler >/lab/out &
    machine=$!
    sleep $delay
    kill -9 $pool
    wait $machine
    echo "status $?: $(tail -n 1 /lab/out)"
    wait $pool 2>/dev/null
done
start_pool
searched
kill $pool
wait $pool 2>/dev/null
echo "== left"
echo "$(pgrep -c '^tare$') processes, $(($(shmem) - before)) MiB"
"#;

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_pool_shows_no_guest_what_another_wrote() {
    let Ok(folder) = tempfile::tempdir() else { panic!("no room for a temporary folder") };
    let kernels = [
        kernel(folder.path(), "filler", "/lab/filler", &filler(true)),
        kernel(folder.path(), "sleeper", "/lab/sleeper", &filler(false)),
        kernel(folder.path(), "searcher", "/lab/searcher", &searcher()),
    ];
    let printed = script(POOL, &kernels);
    assert_eq!(printed.part("ends"), format!("all zero\n{}", "filled\nall zero\n".repeat(2)), "{printed:#?}");
    // The last one was left alone for long enough to fill its memory.
    assert_eq!(printed.part("machines killed"), format!("{}1\n", "all zero\n".repeat(6)), "{printed:#?}");
    let killed: Vec<&str> = printed.part("pools killed").lines().collect();
    assert_eq!((killed.len(), killed.last()), (7, Some(&"all zero")), "{printed:#?}");
    for said in &killed[..6] {
        let fine = *said == "status 0: filled"
            || said.starts_with("status 3: tare: ") && said.contains("memory pool") && said.contains("add fallback=on");
        assert!(fine, "{said}: {printed:#?}");
    }
    assert!(printed.part("left").starts_with("0 processes, 0 MiB"), "{printed:#?}");
}
