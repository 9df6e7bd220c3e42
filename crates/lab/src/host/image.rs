// SPDX-License-Identifier: Apache-2.0
//! Cooks the recipe: Debian from the machine's own package sources into the guests' disk and the lab machine's root.
//!
//! No loop device and no mount: `mmdebstrap` fills a folder, `mkfs.ext4 -d` makes a disk of it, `cpio` an initramfs.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use super::cache::Cache;
use super::process::{Mortal, output, run};
use super::{Progress, recipe};

/// Longest time for a Debian to be fetched and unpacked.
const BOOTSTRAP: Duration = Duration::from_secs(900);
/// Longest time for any other tool.
const TOOL: Duration = Duration::from_secs(180);

/// The guests' Debian: where its parts are.
#[derive(Debug, Clone)]
pub struct Guest {
    folder: PathBuf,
}

impl Guest {
    /// The root disk, raw ext4 without a partition table.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.folder.join("root.ext4")
    }

    /// The stock kernel.
    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    /// The stock initrd.
    #[must_use]
    pub fn initrd(&self) -> PathBuf {
        self.folder.join("initrd.img")
    }

    /// The kernel's version.
    ///
    /// # Errors
    /// When the image has none.
    pub fn release(&self) -> Result<String> {
        Ok(fs::read_to_string(self.folder.join("release"))?.trim().to_owned())
    }

    /// Packages and their versions, one a line.
    #[must_use]
    pub fn packages(&self) -> PathBuf {
        self.folder.join("packages")
    }
}

/// The guests' Debian, built if it is not there.
///
/// # Errors
/// When a tool is missing or fails; the text quotes it.
pub fn guest(cache: &Cache, progress: Progress<'_>) -> Result<Guest> {
    let folder = cache.get("guest", recipe::guest_key(), &mut |folder| {
        progress("guest image: fetching Debian", Some(0.0));
        let root = folder.join("root");
        bootstrap(&root, recipe::GUEST_PACKAGES, &[], folder)?;
        progress("guest image: making its disk", Some(0.45));
        let kernel = find_kernel(&root)?;
        fs::copy(root.join(format!("boot/vmlinuz-{kernel}")), folder.join("vmlinuz"))?;
        fs::copy(root.join(format!("boot/initrd.img-{kernel}")), folder.join("initrd.img"))?;
        fs::write(folder.join("release"), &kernel)?;
        fs::write(root.join("etc/fstab"), "/dev/vda / ext4 defaults 0 1\n")?;
        fs::write(root.join("etc/hostname"), "guest\n")?;
        fs::write(root.join("etc/machine-id"), "")?;
        let disk = folder.join("root.ext4");
        File::create(&disk)?.set_len(recipe::GUEST_DISK)?;
        let mut mkfs = Command::new("mkfs.ext4");
        mkfs.args(["-q", "-F", "-L", "root", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-d"])
            .arg(&root)
            .arg(&disk);
        run(&mut mkfs, TOOL, &folder.join("log"))?;
        keep_modules(&root, &kernel, &folder.join("modules"))?;
        fs::remove_dir_all(&root).with_context(|| format!("remove {}", root.display()))
    })?;
    Ok(Guest { folder })
}

/// Both images: the guests' Debian and the lab machine's root, an uncompressed initramfs without an agent. What has to
/// be fetched is fetched side by side.
///
/// # Errors
/// As [`guest`].
pub fn both(cache: &Cache, progress: Progress<'_>) -> Result<(Guest, PathBuf)> {
    if let Some(root) = cache.find("machine", recipe::machine_key()) {
        return Ok((guest(cache, progress)?, root.join(ROOT_ARCHIVE)));
    }
    std::thread::scope(|scope| {
        let base = scope.spawn(|| machine_base(cache));
        let guest = guest(cache, progress)?;
        progress("lab machine: fetching Debian", Some(0.5));
        let base = base.join().map_err(|_| anyhow!("the thread that fetched the lab machine's Debian panicked"))??;
        let root = machine_root(cache, &guest, &base, progress)?;
        Ok((guest, root))
    })
}

/// Name of the lab machine's root in its folder.
const ROOT_ARCHIVE: &str = "root.cpio";

/// The lab machine's Debian as a folder.
fn machine_base(cache: &Cache) -> Result<PathBuf> {
    let folder = cache.get("base", recipe::machine_base_key(), &mut |folder| {
        let leave_out = ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*"];
        bootstrap(&folder.join("root"), recipe::MACHINE_PACKAGES, &leave_out, folder)
    })?;
    Ok(folder.join("root"))
}

fn machine_root(cache: &Cache, guest: &Guest, base: &Path, progress: Progress<'_>) -> Result<PathBuf> {
    let folder = cache.get("machine", recipe::machine_key(), &mut |folder| {
        progress("lab machine: packing its root", Some(0.6));
        let (root, log) = (folder.join("root"), folder.join("log"));
        run(Command::new("cp").arg("-a").arg(base).arg(&root), TOOL, &log)?;
        for drop in recipe::MACHINE_DROPS {
            remove(&root.join(drop))?;
        }
        for path in ["var/log", "var/cache", "var/lib/apt", "boot", "etc/tare", "lab", "usr/lib/modules"] {
            fs::create_dir_all(root.join(path))?;
        }
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(guest.folder.join("modules/.")).arg(root.join("usr/lib/modules"));
        run(&mut copy, TOOL, &log)?;
        fs::write(root.join("etc/tare/modules"), recipe::MODULES)?;
        fs::write(root.join("init"), recipe::INIT)?;
        fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755))?;
        pack(&root, &folder.join(ROOT_ARCHIVE))?;
        fs::remove_dir_all(&root).with_context(|| format!("remove {}", root.display()))
    })?;
    Ok(folder.join(ROOT_ARCHIVE))
}

/// A second, small archive that puts the agent into the root.
///
/// # Errors
/// As [`guest`].
pub fn agent_archive(agent: &Path, folder: &Path) -> Result<PathBuf> {
    let root = folder.join("agent-root");
    fs::create_dir_all(root.join("usr/sbin"))?;
    fs::copy(agent, root.join("usr/sbin/tare-agent")).with_context(|| format!("copy {}", agent.display()))?;
    fs::set_permissions(root.join("usr/sbin/tare-agent"), fs::Permissions::from_mode(0o755))?;
    let archive = folder.join("agent.cpio");
    pack(&root, &archive)?;
    fs::remove_dir_all(&root)?;
    Ok(archive)
}

fn bootstrap(root: &Path, packages: &[&str], leave_out: &[&str], folder: &Path) -> Result<()> {
    // SAFETY: plain system call without arguments.
    if unsafe { libc::geteuid() } != 0 {
        bail!("making the lab's images takes root: run this once as root");
    }
    let sources = folder.join("sources.list");
    fs::write(&sources, sources_of_this_machine()?)?;
    let mut command = Command::new("mmdebstrap");
    command.args(["--mode=root", "--variant=minbase"]).arg(format!("--include={}", packages.join(",")));
    command.arg("--aptopt=APT::Install-Recommends \"false\"");
    for (name, value) in proxies()? {
        command.arg(format!("--aptopt={name} \"{value}\""));
    }
    for pattern in leave_out {
        command.arg(format!("--dpkgopt=path-exclude={pattern}"));
    }
    command.arg(recipe::RELEASE).arg(root).arg(&sources);
    run(&mut command, BOOTSTRAP, &folder.join("log"))?;
    for left_over in ["etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap", "etc/resolv.conf"] {
        remove(&root.join(left_over))?;
    }
    let list =
        output(Command::new("dpkg-query").arg(format!("--admindir={}", root.join("var/lib/dpkg").display())).args([
            "--show",
            "--showformat",
            "${Package} ${Version}\n",
        ]))?;
    Ok(fs::write(folder.join("packages"), list)?)
}

/// Debian's package sources as this machine's apt knows them.
pub(super) fn sources_of_this_machine() -> Result<String> {
    let list = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "deb $(REPO_URI) $(CODENAME) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
        "Origin: Debian",
    ]))?;
    let sources = pick_sources(&list);
    if sources.is_empty() {
        bail!("apt knows no source of Debian {}: run `apt-get update`, or add one", recipe::RELEASE);
    }
    Ok(sources)
}

/// Keeps the main component of this release's suites; the code name column only serves to choose.
fn pick_sources(list: &str) -> String {
    let mut lines = Vec::new();
    for line in list.lines() {
        let [deb, uri, codename, suite, "main"] = line.split_whitespace().collect::<Vec<_>>()[..] else { continue };
        let line = format!("{deb} {uri} {suite} main\n");
        if codename.starts_with(recipe::RELEASE)
            && suite.starts_with(recipe::RELEASE)
            && !suite.contains("backports")
            && !lines.contains(&line)
        {
            lines.push(line);
        }
    }
    lines.concat()
}

fn proxies() -> Result<Vec<(String, String)>> {
    let dump = output(Command::new("apt-config").arg("dump"))?;
    Ok(dump.lines().filter_map(proxy_line).collect())
}

fn proxy_line(line: &str) -> Option<(String, String)> {
    let (name, value) = line.strip_suffix("\";")?.split_once(" \"")?;
    let known = ["Acquire::http::Proxy", "Acquire::https::Proxy"].iter().any(|known| known.eq_ignore_ascii_case(name));
    (known && !value.is_empty()).then(|| (name.to_owned(), value.to_owned()))
}

fn find_kernel(root: &Path) -> Result<String> {
    for entry in fs::read_dir(root.join("boot"))? {
        if let Some(release) = entry?.file_name().to_string_lossy().strip_prefix("vmlinuz-") {
            return Ok(release.to_owned());
        }
    }
    bail!("{} has no kernel", root.display())
}

/// Copies the modules of the recipe, and those they need, out of the guests' root.
fn keep_modules(root: &Path, kernel: &str, target: &Path) -> Result<()> {
    let all = root.join("usr/lib/modules").join(kernel);
    let kept = target.join(kernel);
    fs::create_dir_all(&kept)?;
    for name in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        fs::copy(all.join(name), kept.join(name)).with_context(|| format!("copy {name}"))?;
    }
    for name in recipe::module_names() {
        let list = output(Command::new("modprobe").arg("-d").arg(root).args(["-S", kernel, "--show-depends", name]))?;
        for line in list.lines() {
            let Some(path) = line.strip_prefix("insmod ").and_then(|rest| rest.split_whitespace().next()) else {
                continue;
            };
            let (_, inside) =
                path.split_once(&format!("/lib/modules/{kernel}/")).with_context(|| format!("odd path {path}"))?;
            let to = kept.join(inside);
            fs::create_dir_all(to.parent().unwrap_or(&kept))?;
            fs::copy(all.join(inside), &to).with_context(|| format!("copy module {inside}"))?;
        }
    }
    let base = target.with_extension("base");
    fs::create_dir_all(base.join("lib"))?;
    fs::rename(target, base.join("lib/modules"))?;
    output(Command::new("depmod").arg("-b").arg(&base).arg(kernel))?;
    fs::rename(base.join("lib/modules"), target)?;
    Ok(fs::remove_dir_all(&base)?)
}

/// Packs a folder into a cpio archive as the kernel wants it, owners and times included.
fn pack(root: &Path, archive: &Path) -> Result<()> {
    let mut find = Mortal::spawn(
        Command::new("sh")
            .arg("-c")
            .arg("find . -print0 | LC_ALL=C sort -z | cpio --null --create --format=newc --quiet --reproducible")
            .current_dir(root)
            .stdin(Stdio::null())
            .stdout(File::create(archive)?),
    )?;
    match find.wait_for(TOOL)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => bail!("packing {} failed ({status})", root.display()),
        None => bail!("packing {} took too long", root.display()),
    }
}

fn remove(path: &Path) -> Result<()> {
    let Ok(data) = path.symlink_metadata() else { return Ok(()) };
    let done = if data.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    done.with_context(|| format!("remove {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_release_and_its_main_component_are_taken() {
        let list = "deb http://m/debian/ bookworm bookworm main\n\
                    deb http://m/debian/ bookworm bookworm main\n\
                    deb http://m/debian/ bookworm bookworm contrib\n\
                    deb http://m/debian/ bookworm-updates bookworm-updates main\n\
                    deb http://m/debian-security/ bookworm-security bookworm-security main\n\
                    deb http://m/debian/ bookworm-backports bookworm-backports main\n\
                    deb http://m/debian/ trixie trixie main\n\
                    garbage\n";
        let picked = pick_sources(list);
        let suites: Vec<_> = picked.lines().filter_map(|line| line.split(' ').nth(2)).collect();
        assert_eq!(suites, ["bookworm", "bookworm-updates", "bookworm-security"]);
        assert_eq!(pick_sources(""), "");
    }

    #[test]
    fn proxies_are_read_from_apts_configuration() {
        assert_eq!(
            proxy_line("Acquire::http::Proxy \"http://p:3142\";"),
            Some(("Acquire::http::Proxy".into(), "http://p:3142".into()))
        );
        assert_eq!(proxy_line("Acquire::http::Proxy \"\";"), None);
        assert_eq!(proxy_line("Acquire::http::Timeout \"5\";"), None);
        assert_eq!(proxy_line("junk"), None);
    }
}
