// SPDX-License-Identifier: Apache-2.0
//! Which virtio devices a VM has, by its description, and what the main thread keeps of each: the console's input, and the
//! counters for the ledger. A new device is added here, in `spec` and in its own folder, and nowhere else.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use base::news::News;
use base::reactor::Token;
use spec::Vm;
use virtio::VirtioDevice;
use virtio::blk::{Blk, BlkControl, BlkStats};
use virtio::console::{Console, ConsolePort};
use virtio::mem::MemDevice;
use virtio::net::{Net, NetStats, VhostMemory};
use virtio::rng::Rng;
use virtio::stats::Counters;

use crate::bus::{Bus, Function};
use crate::console::ConsoleIo;
use crate::error::{Error, host};
use crate::hotplug::{MemoryControl, Pieces};
use crate::ledger::DeviceLedger;

/// How long the guest's last output may wait for a slow reader once the guest is over.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// The way to change a disk, and where it is on the bus, which tells the guest.
pub type DiskControl = (BlkControl, Function);

/// Token of what devices have to say; the console's are below.
const NEWS: Token = 7;

/// What the main thread keeps of the devices.
#[derive(Default)]
pub struct Registry {
    disks: Vec<Arc<BlkStats>>,
    nets: Vec<Arc<NetStats>>,
    small: Vec<(&'static str, Arc<Counters>)>,
    console: Option<ConsolePort>,
    /// Of each disk, if anybody may ask for changes.
    controls: Vec<DiskControl>,
    /// The way to plug memory, if there is any to plug.
    memory: Option<MemoryControl>,
    /// Input that the guest's console had no room for.
    waiting: Vec<u8>,
    /// What devices have to say to the user.
    news: Option<Arc<News>>,
}

impl Registry {
    /// Makes the devices that `vm` asks for and puts them on the bus, in the order the guest should find them, the one for
    /// memory over `pieces`; what the host's kernel serves of them reaches `memory`. With `remote` also the ways to change them
    /// while they run.
    ///
    /// # Errors
    /// [`Error::Disk`] and [`Error::Net`] for what can't be opened, [`Error::Host`] when the host is out of something.
    pub fn populate(
        vm: &Vm,
        bus: &mut Bus,
        io: &ConsoleIo,
        pieces: Option<Pieces>,
        memory: &Arc<VhostMemory>,
        remote: bool,
    ) -> Result<Self, Error> {
        let news = Arc::new(News::new().map_err(host("make an eventfd"))?);
        let mut out = Self { news: Some(Arc::clone(&news)), ..Self::default() };
        let mut add = |name: &str, device: Box<dyn VirtioDevice>| {
            let function = bus.add(device)?;
            function.report_to(name, &news);
            Ok::<Function, Error>(function)
        };
        if vm.console == spec::Console::Virtio {
            let (console, port) = Console::new(&io.output, None).map_err(host("make the console"))?;
            out.small.push(("console", console.counters().clone()));
            out.console = Some(port);
            add("console", Box::new(console))?;
        }
        for (number, disk) in vm.disks.iter().enumerate() {
            let disk = spec::Disk { queues: Some(vm.queues(disk)), ..disk.clone() };
            let disk = Blk::open(&disk)?.numbered(number).reporting_to(&news);
            if let Some(warning) = disk.warning() {
                base::news::print(warning);
            }
            out.disks.push(disk.stats());
            let control = if remote { Some(disk.control().map_err(host("make a handle on a disk"))?) } else { None };
            let function = add(&format!("disk{number}"), Box::new(disk))?;
            out.controls.extend(control.map(|control| (control, function)));
        }
        for (number, net) in vm.nets.iter().enumerate() {
            let net = Net::open(net, number)?.reporting_to(&news).reaching(memory);
            out.nets.push(net.stats());
            add(&format!("net{number}"), Box::new(net))?;
        }
        if vm.rng {
            let rng = Rng::new();
            out.small.push(("rng", rng.counters().clone()));
            add("rng", Box::new(rng))?;
        }
        if let Some(pieces) = pieces {
            let memory = MemDevice::new(pieces.hot().clone(), Box::new(pieces), 0).reporting_to(&news);
            out.small.push(("memory", memory.counters().clone()));
            let control = memory.control();
            let function = add("memory", Box::new(memory))?;
            out.memory = Some(MemoryControl::new(control, function, vm.memory.at_start()));
        }
        Ok(out)
    }

    /// Where devices put what they have to say.
    #[must_use]
    pub const fn news(&self) -> Option<&Arc<News>> {
        self.news.as_ref()
    }

    /// The way to plug memory, if there is any to plug.
    #[must_use]
    pub const fn memory(&self) -> Option<&MemoryControl> {
        self.memory.as_ref()
    }

    /// Descriptors for the main loop to watch, with tokens for [`Registry::on_ready`] that start at `first`.
    #[must_use]
    pub fn sources(&self, first: Token) -> Vec<(RawFd, Token)> {
        let sources = self.console.iter().flat_map(ConsolePort::sources);
        let news = self.news.iter().map(|news| (news.as_raw_fd(), NEWS));
        sources.chain(news).map(|(fd, token)| (fd, first + token)).collect()
    }

    /// A source is readable; `token` is relative to the `first` of [`Registry::sources`].
    pub fn on_ready(&mut self, token: Token) {
        if token == NEWS {
            return self.tell_news();
        }
        let Some(console) = &mut self.console else { return };
        if console.on_ready(token) {
            let waiting = std::mem::take(&mut self.waiting);
            self.input(&waiting);
        }
    }

    /// Tells the user what devices have to say.
    fn tell_news(&self) {
        tell(self.news.as_ref().map(|news| news.take()).unwrap_or_default());
    }

    /// Hands user input to the guest's virtio console; what it has no room for waits.
    pub fn input(&mut self, bytes: &[u8]) {
        let Some(console) = &mut self.console else { return };
        let taken = if self.waiting.is_empty() { console.input(bytes) } else { 0 };
        self.waiting.extend_from_slice(bytes.get(taken..).unwrap_or_default());
    }

    /// The ways to change the disks; taken.
    pub fn take_controls(&mut self) -> Vec<DiskControl> {
        std::mem::take(&mut self.controls)
    }

    /// The vCPUs have stopped: the guest's last output goes out, and what the devices said last.
    pub fn drain(&mut self) {
        if let Some(console) = &mut self.console {
            console.drain(LAST_OUTPUT);
            if let Some(why) = console.take_trouble() {
                tell(vec![format!("console: {why}: standard output; what the guest printed since then is lost")]);
            }
        }
        self.tell_news();
    }

    /// What each device did.
    #[must_use]
    pub fn ledgers(&self) -> Vec<DeviceLedger> {
        let disks = self.disks.iter().enumerate().map(|(number, stats)| {
            let c = stats.read();
            DeviceLedger {
                name: format!("disk{number}"),
                requests: c.requests(),
                bytes_read: c.read_bytes,
                bytes_written: c.write_bytes,
                kicks: c.wakes,
                interrupts: c.interrupts,
                throttled: c.throttled,
                throttled_ns: c.throttled_ns,
                coalesced: c.coalesced,
                coalesced_ns: c.coalesced_ns,
            }
        });
        let small = self.small.iter().map(|(name, counters)| {
            let c = counters.get();
            DeviceLedger {
                name: (*name).to_owned(),
                requests: c.requests,
                bytes_read: c.bytes_to_guest,
                bytes_written: c.bytes_from_guest,
                kicks: c.kicks,
                interrupts: c.interrupts,
                ..DeviceLedger::default()
            }
        });
        let nets = self.nets.iter().enumerate().map(|(number, stats)| {
            let c = stats.read();
            DeviceLedger {
                name: format!("net{number}"),
                requests: c.received + c.sent,
                bytes_read: c.received_bytes,
                bytes_written: c.sent_bytes,
                kicks: c.kicks,
                interrupts: c.interrupts,
                throttled: c.throttled,
                throttled_ns: c.throttled_ns,
                coalesced: c.coalesced,
                coalesced_ns: c.coalesced_ns,
            }
        });
        disks.chain(nets).chain(small).collect()
    }
}

/// Lines for the user beside the guest's output.
fn tell(lines: Vec<String>) {
    for line in lines {
        base::news::print_beside_guest(&line);
    }
}
