// SPDX-License-Identifier: Apache-2.0
//! What may be asked of a machine while it runs: [`spec::Command`] to what does it. Called from a thread outside the machine,
//! which ends before the machine does.

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use spec::{Command, DiskInfo, Info, RemoveDevice, Reply, ResizeDisk};

use crate::dispatch::Dispatch;
use crate::hotplug::MemoryControl;
use crate::registry::DiskControl;

/// Whoever passes commands on.
pub trait Remote {
    /// The machine is about to run. Threads that are started here have its signal mask; dropping what is returned ends them.
    ///
    /// # Errors
    /// When the host has no thread or descriptor left; the machine does not start then.
    fn started(&mut self, controls: Controls) -> io::Result<Box<dyn Any>>;
}

/// The ways to change a machine that runs.
pub struct Controls {
    info: Info,
    disks: Vec<DiskControl>,
    memory: Option<MemoryControl>,
    dispatch: Arc<Dispatch>,
}

/// What says no to devices of the host.
const NO_BUS: &str = "a machine without a PCI bus can't have a PCI device: --vfio; start it without --transport mmio";

impl Controls {
    pub(crate) fn new(
        vm: &spec::Vm,
        disks: Vec<DiskControl>,
        memory: Option<MemoryControl>,
        dispatch: &Arc<Dispatch>,
    ) -> Self {
        let known = vm.disks.iter().enumerate().map(|(number, disk)| DiskInfo {
            id: format!("disk{number}"),
            path: disk.path.clone(),
            size: 0,
            queues: vm.queues(disk),
            readonly: disk.readonly,
        });
        let info = Info {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            state: "Running".to_owned(),
            cpus: vm.cpus.count,
            memory: vm.memory.size,
            memory_actual: vm.memory.size,
            memory_most: vm.memory.size,
            disks: known.collect(),
            vfio: Vec::new(),
        };
        Self { info, disks, memory, dispatch: dispatch.clone() }
    }

    /// Does what `command` says; waits for the host where it has to.
    #[must_use]
    pub fn execute(&self, command: Command) -> Reply {
        match command {
            Command::Info => {
                let mut info = self.info.clone();
                for (disk, (control, _)) in info.disks.iter_mut().zip(&self.disks) {
                    disk.size = control.size();
                }
                if let Some(memory) = &self.memory {
                    (info.memory, info.memory_actual, info.memory_most) =
                        (memory.wanted(), memory.actual(), memory.most());
                }
                info.vfio = self.dispatch.bus().passed();
                Reply::Info(info)
            }
            Command::AddDevice(device) => {
                let added = self.dispatch.passthrough().map(|all| all.add(&device, self.dispatch.bus()));
                done(added.map(|added| added.map_err(|e| e.to_string())))
            }
            Command::RemoveDevice(device) => done(self.remove(&device)),
            Command::ResizeDisk(resize) => self.resize(&resize).map_or_else(Reply::Refused, |()| Reply::Done),
            Command::ResizeMemory(resize) => {
                self.resize_memory(resize.desired_size).map_or_else(Reply::Refused, |()| Reply::Done)
            }
        }
    }

    fn remove(&self, device: &RemoveDevice) -> Option<Result<(), String>> {
        let how = (Duration::from_secs(device.timeout.into()), device.force);
        let all = self.dispatch.passthrough()?;
        let removed = all.remove(device.host, self.dispatch.bus(), how, self.dispatch.control().event());
        Some(removed.map_err(|e| e.to_string()))
    }

    fn resize_memory(&self, bytes: u64) -> Result<(), String> {
        let refused = |why: String| format!("memory can't be {} MiB: desired_size; {why}", bytes >> 20);
        let Some(memory) = &self.memory else {
            return Err(refused("start the machine with --memory SIZE,hotplug=SIZE".to_owned()));
        };
        memory.resize(bytes).map_err(refused)
    }

    fn resize(&self, wanted: &ResizeDisk) -> Result<(), String> {
        let number = self.info.disks.iter().position(|disk| disk.id == wanted.id);
        let Some((control, function)) = number.and_then(|number| self.disks.get(number)) else {
            let ids: Vec<&str> = self.info.disks.iter().map(|disk| disk.id.as_str()).collect();
            let known = if ids.is_empty() { "it has none".to_owned() } else { format!("it has {}", ids.join(", ")) };
            return Err(format!("the machine has no disk `{}`: id; {known}", wanted.id.escape_default()));
        };
        let path = control.path().display();
        control.resize(wanted.desired_size).map_err(|e| format!("disk {path}: can't be resized: {e}"))?;
        // The function's lock is taken after the host is done, for the moment that the guest's view of it takes.
        function.update_config();
        Ok(())
    }
}

/// What came of plugging, if this machine can do that.
fn done(plugged: Option<Result<(), String>>) -> Reply {
    plugged.unwrap_or_else(|| Err(NO_BUS.to_owned())).map_or_else(Reply::Refused, |()| Reply::Done)
}
