// SPDX-License-Identifier: Apache-2.0
//! Kernels that nobody tuned anything for: Debian's kernel for ordinary machines and its real-time one.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::lab::{Printed, script};

/// Runs a tool and gives its standard output.
#[track_caller]
fn tool(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A kernel and the modules it needs for a virtio disk, out of Debian's package.
struct Kernel {
    release: String,
    vmlinuz: PathBuf,
    modules: PathBuf,
}

/// Takes the package that the empty package `meta` stands for.
#[track_caller]
fn fetch(meta: &str, folder: &Path) -> Kernel {
    let depends = tool(Command::new("apt-cache").args(["depends", "--no-recommends", "--no-suggests", meta]));
    let real =
        depends.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).expect("a kernel package").to_owned();
    tool(Command::new("apt-get").args(["download", "--quiet", &real]).current_dir(folder));
    let list = std::fs::read_dir(folder).expect("the folder");
    let package = list.flatten().map(|entry| entry.path()).find(|path| path.extension().is_some_and(|e| e == "deb"));
    let root = folder.join("root");
    tool(Command::new("dpkg-deb").arg("-x").arg(package.expect("the package")).arg(&root));
    let release = real.trim_start_matches("linux-image-").to_owned();
    tool(Command::new("depmod").env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").arg("-b").arg(&root).arg(&release));
    let wanted = ["virtio_pci", "virtio_blk", "ext4", "crc32c_generic"];
    let mut show = Command::new("modprobe");
    show.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").arg("-d").arg(&root).args([
        "-S",
        &release,
        "--show-depends",
        "-a",
    ]);
    // One archive, its members in the order in which they have to be loaded.
    let mut names: Vec<String> = Vec::new();
    for line in tool(show.args(wanted)).lines() {
        let Some(path) = line.strip_prefix("insmod ").and_then(|rest| rest.split_whitespace().next()) else { continue };
        if !names.iter().any(|name| name == path) {
            names.push(path.to_owned());
        }
    }
    let kept = folder.join("modules");
    std::fs::create_dir(&kept).expect("a folder");
    for (index, name) in names.iter().enumerate() {
        std::fs::copy(name, kept.join(format!("{index:02}.ko"))).expect("a module");
    }
    let modules = folder.join("modules.tar");
    tool(Command::new("tar").arg("-cf").arg(&modules).arg("-C").arg(&kept).arg("."));
    Kernel { vmlinuz: root.join(format!("boot/vmlinuz-{release}")), release, modules }
}

/// Boots it with a small initrd of its own modules that mounts the stock root disk.
#[track_caller]
fn boot(kernel: &Kernel) -> Printed {
    let text = r#"
mkdir -p /lab/own.modules
tar -xf /lab/modules.tar -C /lab/own.modules
pack_initrd /lab/own.img /lab/own.modules/*.ko
timeout -k 5 150 tare run --kernel /lab/own --initrd /lab/own.img --disk path=/lab/root.ext4,readonly=on --cpus 2 --memory 512M --console serial \
    --cmdline "console=ttyS0 quiet panic=-1 -- -c \"echo up: \$(uname -r);mount -o ro /dev/vda /mnt;grep PRETTY /mnt/etc/os-release;echo cpus: \$(nproc);$OFF\"" </dev/null
echo "status $?"
"#;
    script(text, &[(kernel.vmlinuz.clone(), "/lab/own"), (kernel.modules.clone(), "/lab/modules.tar")])
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn debians_kernel_for_ordinary_machines_boots() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let kernel = fetch("linux-image-amd64", folder.path());
    let printed = boot(&kernel);
    printed
        .shows(&format!("up: {}\n", kernel.release))
        .shows("PRETTY_NAME=\"Debian GNU/Linux 12")
        .shows("cpus: 2")
        .shows("status 0");
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn debians_real_time_kernel_boots() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let kernel = fetch("linux-image-rt-amd64", folder.path());
    assert!(kernel.release.contains("-rt-"), "{}", kernel.release);
    let printed = boot(&kernel);
    printed
        .shows(&format!("up: {}\n", kernel.release))
        .shows("PRETTY_NAME=\"Debian GNU/Linux 12")
        .shows("cpus: 2")
        .shows("status 0");
}
