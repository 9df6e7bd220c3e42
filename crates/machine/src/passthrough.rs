// SPDX-License-Identifier: Apache-2.0
//! Devices of the host in this machine: opened before there is any memory, then put on the bus, and all of the guest's
//! memory pinned for them once everything in it is in place; and those that come and go while the guest runs.
//!
//! Called by `build` on the main thread, later by the API's thread and, when the guest lets go of a device, a vCPU's. One lock
//! holds it all together; it is taken before the bus's. Whatever fails closes what was opened, and devices are as they were.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::news::News;
use base::reactor::Reactor;
use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use kvm::{VfioFiles, Vm};
use mem::space::{ListenerId, SpaceError};
use spec::{Iommu, PciAddress, Vfio};
use vfio::{Container, Opened};

use crate::bus::Bus;
use crate::error::{Error, host};
use crate::pci_host::PciHost;
use crate::pci_hotplug::PciHotplug;
use crate::ready::{StartUp, nanoseconds};
use crate::spaces::Spaces;

/// What there is of the host, and what was told to whom.
#[derive(Default)]
struct Inner {
    /// While there is any device.
    container: Option<Container>,
    files: Option<VfioFiles>,
    /// What keeps memory pinned.
    maps: Option<ListenerId>,
    /// Slots that a device was taken out of while the guest had it, until the guest lets go.
    missed: u32,
}

/// The devices that a machine has of the host.
pub struct Passthrough {
    inner: Mutex<Inner>,
    vm: Vm,
    spaces: Spaces,
    news: Arc<News>,
    hotplug: Option<PciHotplug>,
    /// The guest let go of something.
    ejected: EventFd,
    /// Why no device may come: memory that the guest gives back in pieces smaller than those that are pinned.
    no_more: Option<&'static str>,
}

/// Devices that were opened, before there is any memory.
pub struct Taken {
    container: Container,
    files: Option<VfioFiles>,
    devices: Vec<Opened>,
}

impl Taken {
    /// Opens the devices of `spec`, if it has any, for `vm`.
    ///
    /// # Errors
    /// [`Error::Vfio`]: what stands in the way. [`Error::Kvm`].
    pub fn open(spec: &spec::Vm, vm: &Vm) -> Result<Option<Self>, Error> {
        let Some(first) = spec.vfio.first() else { return Ok(None) };
        let mut container = Container::open(first)?;
        let files = vm.vfio_files()?;
        let devices = spec.vfio.iter().map(|device| open(&mut container, files.as_ref(), device));
        let devices = devices.collect::<Result<_, _>>()?;
        Ok(Some(Self { container, files, devices }))
    }
}

/// Opens `device` in `container`; KVM hears through `files` of what is new before.
fn open(container: &mut Container, files: Option<&VfioFiles>, device: &Vfio) -> Result<Opened, Error> {
    if let Some((told, files)) = container.claim(device)?.zip(files) {
        files.add(told)?;
    }
    Ok(container.device(device.host)?)
}

/// Whether a machine made from `spec`, which can be asked for things if `remote`, can have devices that come and go.
#[must_use]
pub fn can_plug(spec: &spec::Vm, remote: bool) -> bool {
    remote && spec.transport == spec::Transport::Pci
}

impl Passthrough {
    /// A machine's, without devices: of `vm` with its `spaces` and `memory`. With `hotplug` they may come.
    ///
    /// # Errors
    /// [`Error::Host`] when the host is out of descriptors.
    pub fn new(
        (vm, spaces, ram): (&Vm, &Spaces, &mem::GuestRam),
        news: &Arc<News>,
        hotplug: Option<PciHotplug>,
    ) -> Result<Self, Error> {
        let small = ram.hot().is_some_and(|hot| hot.block() < mem::piece_to_plug(hot.size()));
        Ok(Self {
            inner: Mutex::default(),
            vm: vm.clone(),
            spaces: spaces.clone(),
            news: news.clone(),
            hotplug,
            ejected: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(host("make an eventfd"))?,
            no_more: small
                .then_some("its plugged memory comes in blocks that can't be pinned; start it with a --vfio device"),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The registers through which the guest hears, if devices may come and go.
    #[must_use]
    pub const fn hotplug(&self) -> Option<&PciHotplug> {
        self.hotplug.as_ref()
    }

    /// Puts the devices that the machine starts with on `bus`.
    ///
    /// # Errors
    /// [`Error::Vfio`] and [`Error::Space`].
    pub fn join(&self, taken: Taken, bus: &mut Bus) -> Result<(), Error> {
        let mut inner = self.lock();
        inner.files = taken.files;
        inner.container = Some(taken.container);
        taken.devices.into_iter().try_for_each(|device| bus.add_vfio(device, &self.news))
    }

    /// Pins all memory for the devices, if there are any, and has them follow what becomes of it. `startup` hears what that
    /// took; `true` if anything was pinned.
    ///
    /// # Errors
    /// [`Error::TooMuch`] where memory can't be pinned.
    pub fn pin(&self, startup: &mut StartUp) -> Result<bool, Error> {
        let begun = Instant::now();
        let mut inner = self.lock();
        let Some(mapped) = self.follow(&mut inner)? else { return Ok(false) };
        startup.pin_ns = nanoseconds(begun);
        startup.iommu = inner.container.as_ref().map(Container::iommu);
        // What is pinned exists.
        startup.ready = mapped;
        Ok(true)
    }

    /// Has the devices' maps follow memory, unless they do or there is no device; the bytes that are pinned now.
    fn follow(&self, inner: &mut Inner) -> Result<Option<u64>, Error> {
        let Inner { container: Some(container), maps: maps @ None, .. } = inner else { return Ok(None) };
        let listener = container.maps()?;
        let mapped = listener.mapped();
        let followed = self.spaces.follow(Box::new(listener));
        let done = || mapped.load(Ordering::Relaxed);
        *maps = Some(followed.map_err(|refused| pinned(&refused, done(), container.iommu()))?);
        Ok(Some(done()))
    }

    /// Gives the guest `device`; it hears of it, and finds it in its own time.
    ///
    /// # Errors
    /// Why not, in one line; nothing has happened then.
    pub fn add(&self, device: &Vfio, bus: &Bus) -> Result<(), Error> {
        let address = device.host;
        let (hotplug, pci) = self.plugs(bus)?;
        let mut inner = self.lock();
        let refused = |why: &str| Err(Error::TooMuch(format!("{address} can't be added: --vfio; {why}")));
        if pci.passed().iter().any(|(_, other)| *other == address) {
            return refused("the machine has it already");
        }
        if pci.passed().len() >= spec::MAX_VFIO {
            return refused("the machine has as many devices of the host as it can have; remove one first");
        }
        if let Some(why) = self.no_more {
            return refused(why);
        }
        let slot = pci.free_slot(inner.missed)?;
        let added = self.open(&mut inner, device).and_then(|opened| {
            self.follow(&mut inner)?;
            pci.plug(slot, pci.function(slot, opened, &self.news)?)
        });
        added.inspect_err(|_| self.release(&mut inner, address))?;
        hotplug.came(slot);
        Ok(())
    }

    /// Opens `device`, in a new container if there is none.
    fn open(&self, inner: &mut Inner, device: &Vfio) -> Result<Opened, Error> {
        let Inner { container, files, .. } = inner;
        if files.is_none() {
            *files = self.vm.vfio_files()?;
        }
        let container = match container {
            Some(container) => container,
            None => container.insert(Container::open(device)?),
        };
        open(container, files.as_ref(), device)
    }

    /// How the machine's devices are behind the IOMMU, as long as it has any.
    #[must_use]
    pub fn iommu(&self) -> Option<Iommu> {
        self.lock().container.as_ref().map(Container::iommu)
    }

    /// Gives the device at `address`, which nobody has any more, back to the host. The last one takes all maps along.
    fn release(&self, inner: &mut Inner, address: PciAddress) {
        let Some(container) = &mut inner.container else { return };
        if let Some((told, files)) = container.closes(address).zip(inner.files.as_ref()) {
            // It may never have been told.
            let _ = files.remove(told);
        }
        if container.is_last(address)
            && let Some(maps) = inner.maps.take()
        {
            // What it can't unmap, the kernel does when the container is closed.
            let _ = self.spaces.unfollow(maps);
        }
        container.release(address);
        if container.is_empty() {
            inner.container = None;
        }
    }

    /// Asks the guest to let go of the device at `address`, and waits for at most `patience`, or until `over` is readable: the
    /// guest's end. With `force` the device goes then all the same.
    ///
    /// # Errors
    /// Why it is not gone, in one line.
    pub fn remove(
        &self,
        address: PciAddress,
        bus: &Bus,
        (patience, force): (Duration, bool),
        over: &EventFd,
    ) -> Result<(), Error> {
        let (hotplug, pci) = self.plugs(bus)?;
        let slot = || pci.passed().into_iter().find(|(_, other)| *other == address).map(|(slot, _)| slot);
        let Some(at) = slot() else {
            let all: Vec<String> = pci.passed().iter().map(|(_, address)| address.to_string()).collect();
            let has = if all.is_empty() { "none".to_owned() } else { all.join(", ") };
            return Err(Error::TooMuch(format!(
                "the machine has no device {address}: --vfio; of the host it has {has}"
            )));
        };
        // What was let go of before is none of ours.
        let _ = self.ejected.read();
        hotplug.ask_back(at);
        let mut reactor = Reactor::new().map_err(host("make an epoll instance"))?;
        reactor.add(&self.ejected, 0).map_err(host("watch a descriptor"))?;
        reactor.add(over, 1).map_err(host("watch a descriptor"))?;
        let end = Instant::now() + patience;
        while slot() == Some(at) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                hotplug.leave(at);
                return self.give_up(at, address, pci, (patience, force));
            }
            let ready = reactor.turn(Some(left.as_millis() as u32 + 1)).map_err(host("wait for events"))?;
            if ready.map(|ready| ready.token).any(|token| token == 1) {
                return Err(Error::TooMuch(format!("{address} was not removed: --vfio; the guest ended")));
            }
            let _ = self.ejected.read();
        }
        Ok(())
    }

    /// The guest did not let go of the device in slot `at` in time.
    fn give_up(
        &self,
        at: u8,
        address: PciAddress,
        pci: &PciHost,
        (patience, force): (Duration, bool),
    ) -> Result<(), Error> {
        let late = format!("the guest did not let go of it in {} s", patience.as_secs());
        if !force {
            let hint = "a guest without ACPI PCI hot-plug never does, --force takes it away all the same";
            return Err(Error::TooMuch(format!("{address} is still the guest's: --vfio; {late} ({hint})")));
        }
        let mut inner = self.lock();
        if let Some(address) = pci.unplug(at)? {
            // Until the guest has let go of what it believes is there, nothing else comes there.
            inner.missed |= 1 << at;
            self.release(&mut inner, address);
            self.news.say(format!("device {address}: taken away, {late}: --force; its driver in the guest may hang"));
        }
        Ok(())
    }

    /// The guest let go of what is in `slot`. Slots without a device of the host are none that it can empty.
    pub fn eject(&self, slot: u8, bus: &Bus) {
        let Bus::Pci(pci) = bus else { return };
        let mut inner = self.lock();
        inner.missed &= !(1 << slot);
        match pci.unplug(slot) {
            Ok(Some(address)) => {
                self.release(&mut inner, address);
                // Only a full counter refuses, and then it is readable.
                let _ = self.ejected.write(1);
            }
            Ok(None) => {}
            Err(error) => self.news.say(error.to_string()),
        }
    }

    /// What plugging takes.
    fn plugs<'a>(&'a self, bus: &'a Bus) -> Result<(&'a PciHotplug, &'a PciHost), Error> {
        match (&self.hotplug, bus) {
            (Some(hotplug), Bus::Pci(pci)) => Ok((hotplug, pci)),
            _ => Err(Error::TooMuch(
                "a machine without a PCI bus can't have a PCI device: --vfio; start it without --transport mmio"
                    .to_owned(),
            )),
        }
    }
}

/// Why memory can't be pinned behind `iommu`, after `done` bytes of it.
fn pinned(refused: &SpaceError, done: u64, iommu: Iommu) -> Error {
    let SpaceError::Refused { source, .. } = refused else { return Error::TooMuch(format!("{refused}: --vfio")) };
    let hint = match (source.raw_os_error(), locked_limit()) {
        (Some(libc::ENOMEM), Some(limit)) => {
            let (who, what) = match iommu {
                Iommu::Iommufd => ("all processes of this user together", "all its guests have"),
                _ => ("this process", "the guest has"),
            };
            format!(
                "{who} may lock {} MiB (ulimit -l): raise that to what {what} and 64 MiB more, or ask for less with --memory",
                limit >> 20
            )
        }
        (Some(libc::ENOMEM), None) => "the host has no more: ask for less with --memory".to_owned(),
        _ => "the host's kernel log says more".to_owned(),
    };
    Error::TooMuch(format!(
        "guest memory can't be pinned for devices after the first {} MiB, {source}: --vfio; {hint}",
        done >> 20
    ))
}

/// How much memory this process may lock, if that is limited.
fn locked_limit() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = text.lines().find(|line| line.starts_with("Max locked memory"))?;
    line.split_ascii_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_was_hit_halfway_is_told_with_how_far_it_came() {
        let refused = |code| SpaceError::Refused {
            what: "give memory to devices",
            at: 3 << 30,
            source: std::io::Error::from_raw_os_error(code),
        };
        let said = pinned(&refused(libc::ENOMEM), 3 << 30, Iommu::Container).to_string();
        assert!(said.starts_with("guest memory can't be pinned for devices after the first 3072 MiB, "), "{said}");
        assert!(said.contains(": --vfio; ") && !said.contains('\n'), "{said}");
        assert!(
            pinned(&refused(libc::EINVAL), 0, Iommu::Iommufd).to_string().ends_with("the host's kernel log says more")
        );
    }
}
