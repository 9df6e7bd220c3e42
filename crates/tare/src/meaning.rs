// SPDX-License-Identifier: Apache-2.0
//! From what was typed to what it means: the config file is read, flags go before it, defaults fill the rest, and the
//! result is checked. Everything after this file sees [`Meant`] only.

use std::fs;
use std::path::{Path, PathBuf};

use spec::{Said, Vm};

use crate::exit::{Failure, reason};
use crate::flags::{Line, OnReset, Typed};

/// What `tare run` is to do.
#[derive(Debug, PartialEq, Eq)]
pub struct Meant {
    /// The machine, checked.
    pub vm: Vm,
    /// What the guest's own reset does.
    pub on_reset: OnReset,
    /// Where the process id goes.
    pub pidfile: Option<PathBuf>,
    /// Where the API's socket goes.
    pub api: Option<PathBuf>,
    /// Whether the boot is explained at the end.
    pub explain: bool,
    /// Names of the guest kernel's functions, for that.
    pub symbols: Option<PathBuf>,
}

impl Meant {
    /// Reads the config file, if one was named, and merges it under the flags. A `--disk` flag stands for all disks.
    ///
    /// # Errors
    /// [`Failure`] with exit code 2.
    pub fn new(line: impl Into<Line>) -> Result<Self, Failure> {
        let Line { typed: flags, config, explain, symbols } = line.into();
        if explain && flags.api.is_some() {
            return Err(Failure::usage("--explain and --api don't go together: command line; take one out"));
        }
        let file = match &config {
            Some(path) => read_config(path)?,
            None => Typed::default(),
        };
        let kernel = flags.kernel.or(file.kernel).ok_or_else(|| {
            Failure::usage("no kernel: command line; name one with --kernel FILE or in --config FILE")
        })?;
        let default = Vm::new(kernel);
        let vm = Vm {
            initrd: flags.initrd.or(file.initrd),
            cmdline: flags.cmdline.or(file.cmdline),
            kernel_load: flags.kernel_load.or(file.kernel_load).unwrap_or(default.kernel_load),
            kernel_decompress: flags.kernel_decompress.or(file.kernel_decompress).unwrap_or(default.kernel_decompress),
            cpus: flags.cpus.or(file.cpus).map_or(default.cpus, |Said(cpus)| cpus),
            cpu: flags.cpu.or(file.cpu).unwrap_or(default.cpu),
            cpu_pin: flags.cpu_pin.or(file.cpu_pin).unwrap_or(default.cpu_pin),
            halt_poll: flags.halt_poll.or(file.halt_poll),
            disable_exits: flags.disable_exits.or(file.disable_exits).unwrap_or(default.disable_exits),
            memory: flags.memory.or(file.memory).map_or(default.memory, |Said(memory)| memory),
            disks: flags.disk.or(file.disk).unwrap_or_default().into_iter().map(|Said(disk)| disk).collect(),
            nets: flags.net.or(file.net).unwrap_or_default().into_iter().map(|Said(net)| net).collect(),
            vfio: flags.vfio.or(file.vfio).unwrap_or_default().into_iter().map(|Said(vfio)| vfio).collect(),
            console: flags.console.or(file.console).unwrap_or(default.console),
            transport: flags.transport.or(file.transport).unwrap_or(default.transport),
            mmio_status: flags.mmio_status.or(file.mmio_status).unwrap_or(default.mmio_status),
            irqchip: flags.irqchip.or(file.irqchip).unwrap_or(default.irqchip),
            vioapic: flags.vioapic.or(file.vioapic),
            rng: flags.rng.or(file.rng).unwrap_or(default.rng),
            debug_exit: flags.debug_exit.or(file.debug_exit),
            ledger: flags.ledger.or(file.ledger),
            kvm: flags.kvm.or(file.kvm).unwrap_or(default.kvm),
            kernel: default.kernel,
        };
        vm.check()?;
        Ok(Self {
            vm,
            on_reset: flags.on_reset.or(file.on_reset).unwrap_or_default(),
            pidfile: flags.pidfile.or(file.pidfile),
            api: flags.api.or(file.api),
            explain,
            symbols,
        })
    }
}

fn read_config(path: &Path) -> Result<Typed, Failure> {
    let text = fs::read_to_string(path).map_err(|e| {
        Failure::usage(format!("config can't be read, {}: {}; check the path and its mode", reason(&e), path.display()))
    })?;
    let mut typed: Typed = toml::from_str(&text).map_err(|e| {
        let line =
            e.span().and_then(|span| text.get(..span.start)).map_or(1, |before| before.matches('\n').count() + 1);
        Failure::usage(format!("config {} line {line}: {}", path.display(), e.message()))
    })?;
    let base = path.parent().unwrap_or(Path::new(""));
    typed.paths_from(base);
    Ok(typed)
}

impl Typed {
    /// Makes relative paths relative to `base`.
    fn paths_from(&mut self, base: &Path) {
        let disks = self.disk.iter_mut().flatten().map(|Said(disk)| &mut disk.path);
        let files =
            [&mut self.kernel, &mut self.initrd, &mut self.ledger, &mut self.pidfile, &mut self.api, &mut self.kvm];
        let memory = self.memory.iter_mut().flat_map(|Said(memory)| [&mut memory.path, &mut memory.pool]).flatten();
        for path in files.into_iter().flatten().chain(disks).chain(memory) {
            // `-` is no path; an empty one stays empty for the check to find.
            if path.as_os_str() != "-" && !path.as_os_str().is_empty() {
                *path = base.join(&*path);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use spec::{Console, Cpus, Disk, Memory};

    use super::*;

    fn with_config(text: &str, change: impl FnOnce(&mut Typed)) -> (tempfile::TempDir, Result<Meant, Failure>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.toml");
        fs::write(&path, text).unwrap();
        let mut typed = Typed::default();
        change(&mut typed);
        let meant = Meant::new(Line { typed, config: Some(path), ..Line::default() });
        (dir, meant)
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_defaults() {
        let file = "kernel = 'k'\nmemory = '1G'\ncpus = 2\ndisk = ['a', '/abs']\nconsole = 'serial'\nledger = '-'\n";
        let (dir, meant) = with_config(file, |t| {
            t.cpus = Some(Said(Cpus::flat(4)));
            t.on_reset = Some(OnReset::Exit);
        });
        let expected = Vm {
            memory: Memory { size: 1 << 30, ..Memory::default() },
            cpus: Cpus::flat(4),
            disks: vec![Disk::new(dir.path().join("a")), Disk::new("/abs")],
            console: Console::Serial,
            ledger: Some("-".into()),
            ..Vm::new(dir.path().join("k"))
        };
        assert_eq!(
            meant.unwrap(),
            Meant { vm: expected, on_reset: OnReset::Exit, pidfile: None, api: None, explain: false, symbols: None }
        );
    }

    #[test]
    fn a_disk_flag_stands_for_all_disks() {
        let (_dir, meant) =
            with_config("kernel = 'k'\ndisk = ['a', 'b']\n", |t| t.disk = Some(vec![Said(Disk::new("c"))]));
        assert_eq!(meant.unwrap().vm.disks, [Disk::new("c")]);
    }

    #[test]
    fn complaints_about_the_file_name_file_and_line() {
        let says = |text: &str| {
            let (dir, meant) = with_config(text, |_| ());
            let failure = meant.unwrap_err();
            failure.message.replace(&dir.path().display().to_string(), "DIR")
        };
        assert_eq!(
            says("kernel = 'k'\nmemory = '12Q'\n"),
            "config DIR/vm.toml line 2: `12Q` is not a size: memory; write a whole number with K, M, G or T, such as 512M"
        );
        let unknown = says("kernel = 'k'\n\ncolour = 1\n");
        assert!(
            unknown.starts_with("config DIR/vm.toml line 3: unknown field `colour`, expected one of `kernel`"),
            "{unknown}"
        );
        assert!(says("kernel = ").starts_with("config DIR/vm.toml line 1: "));
        assert_eq!(says("memory = '1G'"), "no kernel: command line; name one with --kernel FILE or in --config FILE");
        assert_eq!(says("kernel = 'k'\ncpus = 65"), "65 virtual CPUs can't be made: cpus; ask for 1 to 64");
    }
}
