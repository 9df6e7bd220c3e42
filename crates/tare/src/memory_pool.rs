// SPDX-License-Identifier: Apache-2.0
//! `tare memory-pool`: keeps memory allocated and zeroed, and lends it to machines that start with `prealloc=pool`. Runs
//! until it is ended; its machines go on without it.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Instant;

use lexopt::{Arg, Parser};
use mem::Zeroing;
use mem::pool::{Pool, PoolPlan, Stock};
use spec::{Pages, Word, parse_size, show_size};

use crate::exit::{Exit, Failure};
use crate::flags::{Asked, lexed, once, text_of};

/// `tare memory-pool --help`.
pub const HELP: &str = "usage: tare memory-pool --socket SOCKET --size SIZE [flags]

Keeps memory allocated and zeroed, and lends it to machines that start with
`tare run --memory SIZE,prealloc=pool,pool=SOCKET`: they start in a time that does
not grow with their memory. What comes back is zeroed before it is lent again, in
threads that run when no guest wants the CPU. Machines that run don't need the pool.

flags:
  --socket SOCKET   listens there, for the owner alone
  --size SIZE       memory to keep, with K, M, G or T
  --piece SIZE      lends it in pieces of this size [256M]; a machine gets whole ones
  --pages PAGES     thp, 4K, or 2M or 1G from what the host has set aside [thp]
  --zero HOW        erms, sse2, avx2, avx512 (non-temporal stores but for erms), or
                    auto, the fastest here, measured at the start [auto]
  --threads N       threads that zero [1]
";

/// What `tare memory-pool` is to do.
#[derive(Debug, PartialEq, Eq)]
pub struct PoolFlags {
    socket: PathBuf,
    size: u64,
    piece: u64,
    pages: Pages,
    /// `None` is auto.
    zero: Option<Zeroing>,
    threads: usize,
}

/// Reads its flags.
///
/// # Errors
/// [`Failure`] with exit code 2.
pub fn parse(args: &mut Parser) -> Result<Asked<PoolFlags>, Failure> {
    let (mut socket, mut size, mut piece, mut pages, mut zero, mut threads) = (None, None, None, None, None, None);
    while let Some(arg) = args.next().map_err(lexed)? {
        match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(Asked::Help),
            Arg::Long("socket") => once(&mut socket, "--socket", PathBuf::from(args.value().map_err(lexed)?))?,
            Arg::Long("size") => once(&mut size, "--size", parse_size("--size", &text_of("--size", "word", args)?)?)?,
            Arg::Long("piece") => {
                once(&mut piece, "--piece", parse_size("--piece", &text_of("--piece", "word", args)?)?)?
            }
            Arg::Long("pages") => {
                once(&mut pages, "--pages", Pages::from_word("--pages", &text_of("--pages", "word", args)?)?)?
            }
            Arg::Long("zero") => once(&mut zero, "--zero", zeroing(&text_of("--zero", "word", args)?)?)?,
            Arg::Long("threads") => once(&mut threads, "--threads", number(&text_of("--threads", "word", args)?)?)?,
            other => {
                let what = other.unexpected();
                return Err(Failure::usage(format!("{what}: command line; see `tare memory-pool --help`")));
            }
        }
    }
    let missing = |what: &str| Failure::usage(format!("no {what}: command line; see `tare memory-pool --help`"));
    let size = size.ok_or_else(|| missing("--size SIZE"))?;
    let pages = pages.unwrap_or_default();
    let piece = piece.unwrap_or((256 << 20_u64).max(pages.bytes())).min(size.max(1));
    let whole = pages.bytes().max(if pages == Pages::Transparent { 2 << 20 } else { 0 });
    if piece == 0 || !piece.is_multiple_of(whole) {
        let what = format!("{} is no piece of whole pages: --piece", show_size(piece));
        return Err(Failure::usage(format!("{what}; use a multiple of {}", show_size(whole))));
    }
    if size == 0 || !size.is_multiple_of(piece) {
        let what = format!("{} is no whole number of pieces of {}: --size", show_size(size), show_size(piece));
        return Err(Failure::usage(format!("{what}; use a multiple, or another --piece")));
    }
    Ok(Asked::Do(PoolFlags {
        socket: socket.ok_or_else(|| missing("--socket SOCKET"))?,
        size,
        piece,
        pages,
        zero: zero.unwrap_or(None),
        threads: threads.unwrap_or(1),
    }))
}

fn number(text: &str) -> Result<usize, Failure> {
    text.parse().ok().filter(|n| (1..=256).contains(n)).ok_or_else(|| {
        Failure::usage(format!("`{text}` is not a number of threads: --threads; write a whole number from 1 to 256"))
    })
}

fn zeroing(text: &str) -> Result<Option<Zeroing>, Failure> {
    if text == "auto" {
        return Ok(None);
    }
    let way = Zeroing::ALL.into_iter().find(|way| way.name() == text).ok_or_else(|| {
        Failure::usage(format!("`{text}` is not a way to zero: --zero; use erms, sse2, avx2, avx512 or auto"))
    })?;
    if !way.is_there() {
        return Err(Failure::usage(format!("this CPU has no {text}: --zero; use auto")));
    }
    Ok(Some(way))
}

/// Fills the pool and lends from it, until the process is ended.
///
/// # Errors
/// [`Failure`]: too few huge pages, a socket that can't be listened on.
pub fn run(asked: &PoolFlags) -> Result<Exit, Failure> {
    let failed = |what: String| Failure::monitor(what);
    // Before memory is taken: one pool for a socket.
    let listening = Pool::listen(&asked.socket).map_err(|e| failed(e.to_string()))?;
    let zero = asked.zero.unwrap_or_else(Zeroing::fastest);
    let plan = PoolPlan { size: asked.size, piece: asked.piece, pages: asked.pages, zero, threads: asked.threads };
    let begun = Instant::now();
    let pool = Pool::new(plan).map_err(|e| failed(e.to_string()))?;
    let (terminal, pages) = (io::stderr().is_terminal(), asked.pages);
    let teller = pool.clone();
    let tell = move || {
        teller.wait(|stock| {
            if terminal {
                // Standard error may be closed; there is nobody left to tell.
                let _ = write!(io::stderr(), "\r{}", bar(stock, begun.elapsed().as_secs_f64()));
            }
        });
        let (stock, seconds) = (teller.stock(), begun.elapsed().as_secs_f64());
        let gib = (stock.ready + stock.lent) as f64 / f64::from(1 << 30);
        let end = if terminal { "\r" } else { "" };
        let _ = writeln!(
            io::stderr(),
            "{end}tare: the pool has {gib:.2} GiB ready after {seconds:.2} s, {:.2} GiB/s; zero={}; {:.2} GiB in huge pages{}",
            gib / seconds,
            zero.name(),
            huge() as f64 / f64::from(1 << 30),
            if pages == Pages::Transparent && huge() == 0 { NO_HUGE } else { "" }
        );
    };
    std::thread::Builder::new()
        .name("tell".to_owned())
        .spawn(tell)
        .map_err(|e| failed(format!("no thread can be started, {e}: memory-pool; raise the limit on processes")))?;
    pool.serve(listening).map_err(|e| failed(format!("the pool can't go on, {e}: {}", asked.socket.display())))?;
    Ok(Exit::Clean)
}

/// Why there may be none.
const NO_HUGE: &str = ": write advise to /sys/kernel/mm/transparent_hugepage/shmem_enabled, or use --pages 2M";

/// Bytes of this process's files in memory that are in huge pages.
fn huge() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let kib = |line: &str| line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok();
    let names = ["ShmemPmdMapped:", "Shared_Hugetlb:"];
    text.lines().filter(|l| names.iter().any(|name| l.starts_with(name))).filter_map(kib).sum::<u64>() << 10
}

fn bar(stock: Stock, seconds: f64) -> String {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let (ready, all) = (stock.ready + stock.lent, stock.ready + stock.lent + stock.coming);
    let full = (u128::from(ready) * 30 / u128::from(all.max(1))) as usize;
    let (done, left) = ("#".repeat(full), "-".repeat(30 - full.min(30)));
    format!(
        "tare: pool [{done}{left}] {:.1} of {:.1} GiB, {:.1} GiB/s",
        gib(ready),
        gib(all),
        gib(ready) / seconds.max(1e-9)
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parsed(flags: &[&str]) -> Result<PoolFlags, String> {
        match parse(&mut Parser::from_args(flags)) {
            Ok(Asked::Do(asked)) => Ok(asked),
            Ok(Asked::Help) => Err("help".to_owned()),
            Err(failure) => Err(failure.message),
        }
    }

    #[test]
    fn flags_say_what_is_kept() {
        let asked = parsed(&["--socket", "/s", "--size", "8G"]).unwrap();
        assert_eq!(
            (asked.size, asked.piece, asked.pages, asked.zero, asked.threads),
            (8 << 30, 256 << 20, Pages::Transparent, None, 1)
        );
        let asked =
            parsed(&["--socket", "/s", "--size", "4G", "--pages", "1G", "--zero", "sse2", "--threads", "2"]).unwrap();
        assert_eq!((asked.piece, asked.zero, asked.threads), (1 << 30, Some(Zeroing::Sse2), 2));
        assert_eq!(parsed(&["--socket", "/s", "--size", "16M"]).unwrap().piece, 16 << 20);
    }

    #[test]
    fn what_can_not_be_is_one_line() {
        for (flags, part) in [
            (&["--size", "1G"][..], "no --socket"),
            (&["--socket", "/s"], "no --size"),
            (&["--socket", "/s", "--size", "1000M"], "no whole number of pieces of 256M: --size"),
            (&["--socket", "/s", "--size", "0"], "--piece"),
            (&["--socket", "/s", "--size", "1G", "--piece", "1M"], "multiple of 2M"),
            (&["--socket", "/s", "--size", "1G", "--pages", "2M", "--piece", "3M"], "multiple of 2M"),
            (&["--socket", "/s", "--size", "1G", "--zero", "slowly"], "erms, sse2, avx2, avx512 or auto"),
            (&["--socket", "/s", "--size", "1G", "--threads", "0"], "1 to 256"),
            (&["--socket", "/s", "--size", "1G", "--size", "2G"], "given twice"),
            (&["--sockets", "/s"], "tare memory-pool --help"),
        ] {
            let said = parsed(flags).unwrap_err();
            assert!(said.contains(part) && !said.contains('\n'), "{flags:?}: {said}");
        }
    }

    #[test]
    fn the_bar_fills_up() {
        let stock = Stock { ready: 1 << 30, coming: 3 << 30, lent: 0, broken: 0 };
        assert_eq!(
            bar(stock, 1.0),
            format!("tare: pool [{}{}] 1.0 of 4.0 GiB, 1.0 GiB/s", "#".repeat(7), "-".repeat(23))
        );
    }
}
