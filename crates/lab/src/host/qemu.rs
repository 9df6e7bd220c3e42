// SPDX-License-Identifier: Apache-2.0
//! One lab machine: a QEMU process with a software CPU, its folder, its mailbox and its control socket.
//!
//! What is in a machine's folder: `mailbox`, `control` (socket), `console` (the machine's kernel log), `log` (QEMU's own
//! words), `pid`. The machine has no disk, no network and no device that interrupts.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use agent::mailbox;
use anyhow::{Context, Result, bail};
use serde_json::json;

use super::mend::{knows, mend};
use super::process::{Mortal, output, tail};
use super::qmp::Qmp;
use super::recipe;
use super::session::Watch;

/// The program.
pub const QEMU: &str = "qemu-system-x86_64";
/// Longest time for a new QEMU to open its control socket.
const APPEAR: Duration = Duration::from_secs(30);
/// Longest time to save or restore a machine's devices.
const MOVE: Duration = Duration::from_secs(120);

/// How the machine's time passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// One CPU, one instruction is one nanosecond: for figures.
    Counted,
    /// Two CPUs on two threads, time is the host's: for whether things work.
    Threaded,
    /// As [`Mode::Threaded`], and with an IOMMU and devices to hand on: an NVMe disk, and a network card whose wire ends at
    /// another one that stays.
    Passthrough,
}

impl Mode {
    /// Its name in folders and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counted => "counted",
            Self::Threaded => "threaded",
            Self::Passthrough => "passthrough",
        }
    }

    /// What QEMU is told about it.
    #[must_use]
    pub fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Counted => {
                &["-accel", "tcg", "-icount", "shift=0,sleep=off", "-smp", "1", "-rtc", "base=utc,clock=vm"]
            }
            Self::Threaded => &["-accel", "tcg,thread=multi", "-smp", "2", "-rtc", "base=utc,clock=vm"],
            Self::Passthrough => PASSTHROUGH,
        }
    }

    /// Bytes of the machine's memory (sparse, copy-on-write): what devices reach is pinned, so their machine has more.
    pub const fn memory(self) -> u64 {
        match self {
            Self::Counted | Self::Threaded => recipe::MACHINE_MEMORY,
            Self::Passthrough => recipe::MACHINE_MEMORY_PASSTHROUGH,
        }
    }

    /// Bytes of the machine's memory that lie below 4 GiB: the rest goes on above.
    const fn low_memory(self) -> u64 {
        match self {
            Self::Counted | Self::Threaded => 3 << 30,
            Self::Passthrough => 2 << 30,
        }
    }

    /// What the machine's kernel is told beside what every mode's is.
    const fn words(self) -> &'static str {
        match self {
            Self::Counted | Self::Threaded => "",
            Self::Passthrough => " intel_iommu=on",
        }
    }
}

/// The machine of [`Mode::Passthrough`]. QEMU can't save an NVMe disk, so it and the cards are plugged in when a machine goes
/// on: see `plugged`. The IOMMU comes before whatever is behind it.
const PASSTHROUGH: &[&str] = &[
    "-accel",
    "tcg,thread=multi",
    "-smp",
    "2",
    "-rtc",
    "base=utc,clock=vm",
    "-machine",
    "q35",
    "-device",
    "intel-iommu,intremap=on,caching-mode=on",
    "-device",
    "pcie-root-port,id=port0,chassis=1,slot=1,addr=4",
    "-device",
    "pcie-root-port,id=port1,chassis=2,slot=2,addr=5",
    "-device",
    "pcie-root-port,id=port2,chassis=3,slot=3,addr=6",
    "-device",
    "pcie-root-port,id=port3,chassis=4,slot=4,addr=7",
    "-netdev",
    "hubport,id=handed,hubid=0",
    "-netdev",
    "hubport,id=kept,hubid=0",
];
/// The disk that [`Mode::Passthrough`] hands on: a file in the machine's folder, and its size.
const HANDED_DISK: (&str, u64) = ("nvme", 1 << 30);

/// What is plugged into a machine of [`Mode::Passthrough`] before it goes on, as arguments of `device_add`. The last two are
/// functions of one slot, which nothing keeps apart: one group. A slot is told of its functions with the first of them.
fn plugged() -> [serde_json::Value; 5] {
    [
        json!({ "driver": "nvme", "id": "disk", "bus": "port0", "drive": "disk", "serial": "handed" }),
        json!({ "driver": "vmxnet3", "id": "handed-card", "bus": "port1", "netdev": "handed", "mac": "52:54:00:00:00:01" }),
        json!({ "driver": "virtio-net-pci", "id": "kept-card", "bus": "port2", "netdev": "kept", "mac": "52:54:00:00:00:02" }),
        json!({ "driver": "vmxnet3", "id": "beside", "bus": "port3", "addr": "0.1", "multifunction": true, "mac": "52:54:00:00:00:03" }),
        json!({ "driver": "virtio-rng-pci", "id": "first", "bus": "port3", "addr": "0.0", "multifunction": true }),
    ]
}

/// Arguments that both modes share and that a snapshot depends on.
pub const COMMON: &[&str] = &[
    "-nodefaults",
    "-no-user-config",
    "-no-reboot",
    "-display",
    "none",
    // Four levels of page tables walk faster than five, and nothing here needs the fifth.
    "-cpu",
    "max,-la57",
    "-machine",
    "pc,memory-backend=ram,hpet=off,vmport=off,nvdimm=on",
];

/// Where the mailbox stands in the machine: right behind its memory, some of which lies below 4 GiB. It is an NVDIMM
/// without a driver, because QEMU restores one at the same address, where a PCI BAR is at 0 until its state is loaded.
const fn mailbox_at(mode: Mode) -> u64 {
    (4 << 30) + mode.memory() - mode.low_memory()
}
const _: () = assert!(recipe::MACHINE_MEMORY.is_multiple_of(1 << 30) && recipe::MACHINE_MEMORY >= 4 << 30);
const _: () = assert!(recipe::MACHINE_MEMORY_PASSTHROUGH.is_multiple_of(1 << 30));

/// Kernel command line of the machine.
#[must_use]
pub fn command_line(mode: Mode) -> String {
    let (disk, mailbox, words) = (recipe::MACHINE_DISK >> 10, mailbox_at(mode), mode.words());
    format!(
        "console=ttyS0 loglevel=4 tsc=reliable panic=-1 rdinit=/init tare.disk_kib={disk} tare.mailbox={mailbox:#x}{words}"
    )
}

/// The version line of the host's QEMU.
///
/// # Errors
/// When it is not installed.
pub fn version() -> Result<String> {
    let text = output(Command::new(QEMU).arg("--version"))?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// Whether the host's QEMU is one that [`mend`](super::mend) knows: guests don't get stuck under it.
#[must_use]
pub fn is_mendable() -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders)
        .map(|folder| folder.join(QEMU))
        .find(|path| path.is_file())
        .is_some_and(|path| knows(&path))
}

/// Where the machine's memory comes from.
#[derive(Debug, Clone, Copy)]
pub enum Memory<'a> {
    /// A new file that will hold it.
    New(&'a Path),
    /// A file that holds it; the machine gets a private copy as it writes.
    CopyOf(&'a Path),
}

/// A running (or still paused) machine.
#[derive(Debug)]
pub struct Machine {
    folder: PathBuf,
    child: Option<Mortal>,
    qmp: Option<Qmp>,
}

impl Machine {
    /// Boots `kernel` with `initrd` in a new machine that lives in `folder` and dies with the calling thread.
    ///
    /// # Errors
    /// When QEMU can't start.
    pub fn boot(mode: Mode, folder: &Path, memory: &Path, kernel: &Path, initrd: &Path) -> Result<Self> {
        let mut command = prepare(mode, folder, Memory::New(memory), kernel)?;
        command.arg("-initrd").arg(initrd);
        let child = Mortal::spawn(&mut command)?;
        Ok(Self { folder: folder.to_owned(), child: Some(child), qmp: None })
    }

    /// Restores a saved machine into `folder`, paused; it dies with the calling thread.
    ///
    /// # Errors
    /// When QEMU can't start or refuses the saved state.
    pub fn restore(mode: Mode, folder: &Path, memory: &Path, kernel: &Path, state: &Path) -> Result<Self> {
        let mut command = prepare(mode, folder, Memory::CopyOf(memory), kernel)?;
        command.args(["-incoming", "defer"]);
        let child = Mortal::spawn(&mut command)?;
        let mut machine = Self { folder: folder.to_owned(), child: Some(child), qmp: None };
        machine.load(mode, state)?;
        Ok(machine)
    }

    /// As [`Machine::restore`], but the machine outlives this process; [`pid`] finds it again.
    ///
    /// # Errors
    /// As [`Machine::restore`].
    pub fn restore_standing(mode: Mode, folder: &Path, memory: &Path, kernel: &Path, state: &Path) -> Result<Self> {
        let mut command = prepare(mode, folder, Memory::CopyOf(memory), kernel)?;
        command.args(["-incoming", "defer"]);
        // SAFETY: setsid takes no arguments and is async-signal-safe.
        unsafe {
            command.pre_exec(|| if libc::setsid() < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) });
        }
        command.spawn().with_context(|| format!("cannot start {QEMU}: is it installed?"))?;
        let mut machine = Self { folder: folder.to_owned(), child: None, qmp: None };
        machine.load(mode, state)?;
        Ok(machine)
    }

    fn load(&mut self, mode: Mode, state: &Path) -> Result<()> {
        // Its socket answers, so it is QEMU by now and no longer what it was before exec.
        self.qmp()?;
        if let Some(pid) = self.child.as_ref().map(Mortal::id).or_else(|| pid(&self.folder)) {
            // Where this can't be done, guests get stuck now and then: watchdogs end them and the sample is repeated.
            let _ = mend(pid);
        }
        let qmp = self.qmp()?;
        qmp.leave_shared_memory()?;
        qmp.command("migrate-incoming", json!({ "uri": format!("exec:cat {}", quoted(state)?) }))?;
        qmp.await_migration(MOVE)?;
        if mode == Mode::Passthrough {
            for device in plugged() {
                qmp.command("device_add", device)?;
            }
        }
        Ok(())
    }

    fn qmp(&mut self) -> Result<&mut Qmp> {
        if self.qmp.is_none() {
            let begin = Instant::now();
            let stream = loop {
                match connect(&self.folder) {
                    Ok(stream) => break stream,
                    Err(error) if begin.elapsed() > APPEAR => {
                        return Err(error).context("QEMU opened no control socket");
                    }
                    Err(_) => self.check()?,
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            self.qmp = Some(Qmp::greet(stream)?);
        }
        self.qmp.as_mut().context("no control socket")
    }

    /// Its mailbox file.
    #[must_use]
    pub fn mailbox(&self) -> PathBuf {
        self.folder.join("mailbox")
    }

    /// Fails with its last words when the machine has ended.
    ///
    /// # Errors
    /// Then.
    pub fn check(&mut self) -> Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        let Some(status) = child.ended()? else { return Ok(()) };
        bail!("the lab machine ended by itself ({status}): {}", last_words(&self.folder))
    }

    /// Waits until the agent inside has announced itself.
    ///
    /// # Errors
    /// When the machine ends first, `limit` passes, or `stop` says so.
    pub fn await_agent(&mut self, limit: Duration, stop: &dyn Fn() -> bool) -> Result<()> {
        let mailbox = mailbox::Mailbox::map(&File::options().read(true).write(true).open(self.mailbox())?, 0)?;
        let folder = self.folder.clone();
        let mut check = || if stop() { bail!("interrupted") } else { self.check() };
        let mut watch = Watch { deadline: Instant::now() + limit, check: &mut check };
        while !mailbox.is_served() {
            watch.nap("starting").with_context(|| format!("its console says: {}", last_words(&folder)))?;
        }
        Ok(())
    }

    /// Lets a paused machine go on.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn go(&mut self) -> Result<()> {
        self.qmp()?.command("cont", json!({})).map(drop)
    }

    /// Pauses it, writes its devices' state to `state` and ends it; its memory is in its file then.
    ///
    /// # Errors
    /// When QEMU refuses or the state can't be written.
    pub fn save(mut self, state: &Path) -> Result<()> {
        let target = format!("exec:cat > {}", quoted(state)?);
        let qmp = self.qmp()?;
        qmp.command("stop", json!({}))?;
        qmp.leave_shared_memory()?;
        qmp.command("migrate", json!({ "uri": target }))?;
        qmp.await_migration(MOVE)?;
        self.end()
    }

    /// Ends it.
    ///
    /// # Errors
    /// When it does not go even when killed.
    pub fn end(mut self) -> Result<()> {
        if let Ok(qmp) = self.qmp() {
            let _ = qmp.command("quit", json!({}));
        }
        if let Some(mut child) = self.child.take() {
            child.wait_for(Duration::from_secs(10))?;
        }
        Ok(())
    }
}

fn prepare(mode: Mode, folder: &Path, memory: Memory<'_>, kernel: &Path) -> Result<Command> {
    fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    let mailbox = folder.join("mailbox");
    File::create(&mailbox).and_then(|file| file.set_len(mailbox::SIZE as u64))?;
    let (file, share) = match memory {
        Memory::New(path) => {
            File::create(path)?.set_len(mode.memory())?;
            (path, "on")
        }
        Memory::CopyOf(path) => (path, "off,reserve=off"),
    };
    let ram = format!("memory-backend-file,id=ram,size={},share={share},mem-path=", mode.memory());
    let mail = format!("memory-backend-file,id=mail,size={},share=on,mem-path=mailbox", mailbox::SIZE);
    let log = File::create(folder.join("log"))?;
    let mut command = Command::new(QEMU);
    command.args(COMMON).args(mode.arguments());
    let (size, most) = (mode.memory() >> 20, (mode.memory() >> 20) + 4096);
    command.arg("-m").arg(format!("{size}M,slots=1,maxmem={most}M"));
    command.arg("-object").arg(joined(&ram, file)?);
    command.arg("-object").arg(mail).arg("-device").arg(format!("nvdimm,memdev=mail,addr={}", mailbox_at(mode)));
    if mode == Mode::Passthrough {
        let (name, size) = HANDED_DISK;
        File::create(folder.join(name))?.set_len(size)?;
        command.arg("-drive").arg(format!("if=none,id=disk,format=raw,discard=unmap,file={name}"));
    }
    command.args(["-chardev", "file,id=console,path=console", "-serial", "chardev:console"]);
    command.args(["-qmp", "unix:control,server=on,wait=off"]);
    command.arg("-pidfile").arg(folder.join("pid"));
    command.arg("-kernel").arg(kernel).arg("-append").arg(command_line(mode));
    command.current_dir(folder).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Ok(command)
}

/// The process of the machine in `folder`, if it runs.
#[must_use]
pub fn pid(folder: &Path) -> Option<u32> {
    let pid: u32 = fs::read_to_string(folder.join("pid")).ok()?.trim().parse().ok()?;
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let ours = folder.join("pid");
    line.split(|byte| *byte == 0).any(|word| word == ours.as_os_str().as_encoded_bytes()).then_some(pid)
}

/// Connects to the control socket in `folder`, whose path may be longer than a socket address can be.
fn connect(folder: &Path) -> std::io::Result<UnixStream> {
    let open = File::open(folder)?;
    UnixStream::connect(format!("/proc/self/fd/{}/control", open.as_raw_fd()))
}

fn last_words(folder: &Path) -> String {
    let console = tail(&folder.join("console"), 6);
    let log = tail(&folder.join("log"), 4);
    format!("{console}\n{log}").trim().to_owned()
}

/// `path` behind `prefix` as one QEMU option, commas doubled.
fn joined(prefix: &str, path: &Path) -> Result<OsString> {
    let text = path.to_str().context("the cache folder's path is not UTF-8: set TARE_CACHE to one that is")?;
    Ok(format!("{prefix}{}", text.replace(',', ",,")).into())
}

/// `path` as one word of a shell.
fn quoted(path: &Path) -> Result<String> {
    let text = path.to_str().context("the cache folder's path is not UTF-8: set TARE_CACHE to one that is")?;
    Ok(format!("'{}'", text.replace('\'', "'\\''")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn odd_paths_stay_one_word() {
        assert_eq!(quoted(Path::new("/a b/it's")).unwrap(), r"'/a b/it'\''s'");
        assert_eq!(joined("x=", Path::new("/a,b")).unwrap(), "x=/a,,b");
    }

    #[test]
    fn a_pid_file_of_a_dead_or_foreign_process_names_nobody() {
        let folder = std::env::temp_dir().join(format!("tare-lab-pid-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        assert_eq!(pid(&folder), None);
        for text in ["", "junk", "4294967294", &std::process::id().to_string()] {
            fs::write(folder.join("pid"), text).unwrap();
            assert_eq!(pid(&folder), None, "{text:?}");
        }
        let mut child = Command::new("sh")
            .args(["-c", "read x", "-pidfile"])
            .arg(folder.join("pid"))
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        fs::write(folder.join("pid"), child.id().to_string()).unwrap();
        let begin = Instant::now();
        while pid(&folder) != Some(child.id()) {
            assert!(begin.elapsed() < Duration::from_secs(60));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(pid(&folder), None);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn modes_differ_where_it_counts() {
        assert!(Mode::Counted.arguments().contains(&"shift=0,sleep=off"));
        assert!(!Mode::Threaded.arguments().contains(&"-icount"));
        assert_ne!(Mode::Counted.name(), Mode::Threaded.name());
        assert!(command_line(Mode::Passthrough).contains(" intel_iommu=on"));
        assert!(!command_line(Mode::Counted).contains("iommu"));
    }
}
