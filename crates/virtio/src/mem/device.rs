// SPDX-License-Identifier: Apache-2.0
//! The memory device as the transport sees it: configuration, one queue of requests, and the rules that each request is held
//! to. Its kicks come inline, on the thread of the vCPU, which waits for the answer anyway.
//!
//! A guest never has more than was requested at the time, but for what it was given before and keeps: that is its own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::Gpa;
use base::news::{News, Tally};
use mem::Hot;

use super::control::{MemControl, Sizes};
use super::request::{REQUEST_LEN, RESPONSE_LEN, Request, Response};
use crate::device::{Activation, VirtioDevice};
use crate::fault::GuestFault;
use crate::inline::InlineQueue;
use crate::queue::Chain;
use crate::stats::Counters;

/// Bytes of its configuration space (virtio 1.2, 5.15.4).
pub const CONFIG_LEN: usize = 56;
/// How far past what is requested blocks may lie, so that a driver that adds memory in blocks of its own has room.
const EXTENT: u64 = 256 << 20;

/// Feature bits (virtio 1.2, 5.15.3).
pub mod feature {
    /// `VIRTIO_MEM_F_ACPI_PXM`: the node in the configuration is a proximity domain of ACPI's.
    pub const ACPI_PXM: u64 = 1 << 0;
    /// `VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE`: the driver touches nothing that is not plugged.
    pub const UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;
}

/// Who makes what is plugged be there for the guest, and takes it away.
pub trait Place: Send {
    /// Shows the guest `len` bytes at `at`, whole blocks.
    ///
    /// # Errors
    /// When the host can't: the guest is told to try again later, the user why.
    fn plug(&mut self, at: Gpa, len: u64) -> io::Result<()>;

    /// Takes `len` bytes at `at` away, whole blocks that are no longer marked; the host gets back what was behind them.
    ///
    /// # Errors
    /// When the host gets nothing back; the guest has lost them all the same.
    fn unplug(&mut self, at: Gpa, len: u64) -> io::Result<()>;
}

/// The device.
pub struct MemDevice {
    queue: InlineQueue,
    blocks: Blocks,
}

/// What requests are held to, and carried out on.
struct Blocks {
    hot: Arc<Hot>,
    place: Box<dyn Place>,
    sizes: Arc<Sizes>,
    /// What of `sizes.requested` the driver sees.
    requested: u64,
    /// Bytes from the region's start that blocks may be plugged in.
    usable: u64,
    news: Option<(Arc<News>, Tally)>,
}

impl MemDevice {
    /// A device over `hot`, of which nothing is plugged, that wants `requested` bytes plugged.
    #[must_use]
    pub fn new(hot: Arc<Hot>, place: Box<dyn Place>, requested: u64) -> Self {
        let sizes = Arc::<Sizes>::default();
        sizes.requested.store(requested, Ordering::Release);
        let usable = extent(&hot, requested);
        let blocks = Blocks { hot, place, sizes, requested, usable, news: None };
        Self { queue: InlineQueue::new(), blocks }
    }

    /// The user hears through `news` what the host refuses.
    #[must_use]
    pub fn reporting_to(mut self, news: &Arc<News>) -> Self {
        self.blocks.news = Some((Arc::clone(news), Tally::default()));
        self
    }

    /// The way to ask for more or less.
    #[must_use]
    pub fn control(&self) -> MemControl {
        let Blocks { sizes, hot, .. } = &self.blocks;
        MemControl { sizes: Arc::clone(sizes), block: hot.block(), region: hot.size() }
    }

    /// What it counts.
    #[must_use]
    pub const fn counters(&self) -> &Arc<Counters> {
        self.queue.counters()
    }

    fn run(&mut self) {
        self.queue.run(|chain| self.blocks.answer(chain));
    }
}

impl Blocks {
    fn say(&self, what: &str, why: &io::Error) {
        if let Some((news, tally)) = &self.news
            && tally.count().is_some()
        {
            news.say(format!("memory can't be {what}, {why}: memory.hotplug; free some on the host"));
        }
    }

    /// Does what `chain` asks for; gives the bytes of the answer. Without room for one nothing is done.
    fn answer(&mut self, chain: &mut Chain) -> Result<u32, GuestFault> {
        if (chain.writable_len() as usize) < RESPONSE_LEN {
            return Err(GuestFault::NoRoom);
        }
        let mut bytes = [0; REQUEST_LEN];
        let response = match chain.read_at(0, &mut bytes) {
            REQUEST_LEN => self.execute(Request::parse(&bytes)),
            _ => Response::Error,
        };
        Ok(chain.write_at(0, &response.bytes()) as u32)
    }

    /// The bytes of `blocks` blocks at `at`, if these are some, aligned and within what is usable.
    fn range(&self, at: u64, blocks: u16) -> Option<(Gpa, u64)> {
        let block = self.hot.block();
        let len = u64::from(blocks).checked_mul(block).filter(|len| *len > 0)?;
        let from = at.checked_sub(self.hot.start().0).filter(|from| from.is_multiple_of(block))?;
        from.checked_add(len).filter(|end| *end <= self.usable).map(|_| (Gpa(at), len))
    }

    fn execute(&mut self, request: Request) -> Response {
        match request {
            Request::Plug(at, blocks) => self.range(at, blocks).map_or(Response::Error, |(at, len)| self.plug(at, len)),
            Request::Unplug(at, blocks) => {
                self.range(at, blocks).map_or(Response::Error, |(at, len)| self.unplug(at, len))
            }
            Request::UnplugAll => self.unplug_all(),
            Request::State(at, blocks) => match self.range(at, blocks) {
                None => Response::Error,
                Some((at, len)) if self.hot.is_plugged(at, len) => Response::Plugged,
                Some((at, len)) if self.hot.is_any_plugged(at, len) => Response::Mixed,
                Some(_) => Response::Unplugged,
            },
            Request::Unknown => Response::Error,
        }
    }

    fn plug(&mut self, at: Gpa, len: u64) -> Response {
        if self.hot.is_any_plugged(at, len) {
            return Response::Error;
        }
        if self.plugged().saturating_add(len) > self.requested {
            return Response::Nack;
        }
        if let Err(why) = self.place.plug(at, len) {
            self.say("plugged", &why);
            return Response::Nack;
        }
        self.hot.mark(at, len, true);
        self.sizes.plugged.fetch_add(len, Ordering::AcqRel);
        Response::Ack
    }

    fn unplug(&mut self, at: Gpa, len: u64) -> Response {
        if !self.hot.is_plugged(at, len) {
            return Response::Error;
        }
        self.take_out(at, len);
        Response::Ack
    }

    /// Takes blocks out that are plugged.
    fn take_out(&mut self, at: Gpa, len: u64) {
        self.hot.mark(at, len, false);
        self.sizes.plugged.fetch_sub(len, Ordering::AcqRel);
        if let Err(why) = self.place.unplug(at, len) {
            self.say("given back", &why);
        }
    }

    fn unplug_all(&mut self) -> Response {
        let (start, block) = (self.hot.start().0, self.hot.block());
        let mut run = 0;
        for number in 0..=self.usable / block {
            let at = Gpa(start + number * block);
            if number < self.usable / block && self.hot.is_plugged(at, block) {
                run += block;
            } else if run > 0 {
                // Neighbours go together: the host is asked once for each run.
                self.take_out(Gpa(at.0 - run), run);
                run = 0;
            }
        }
        self.usable = extent(&self.hot, self.requested);
        Response::Ack
    }

    fn plugged(&self) -> u64 {
        self.sizes.plugged.load(Ordering::Acquire)
    }

    fn config(&self) -> [u8; CONFIG_LEN] {
        let mut out = [0; CONFIG_LEN];
        let words = [
            self.hot.block(),
            // The node, and padding: there is one such region, and it is the first node's.
            0,
            self.hot.start().0,
            self.hot.size(),
            self.usable,
            self.plugged(),
            self.requested,
        ];
        for (bytes, word) in out.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        out
    }
}

/// How much of the region is usable where `requested` bytes are wanted.
fn extent(hot: &Hot, requested: u64) -> u64 {
    let extent = if requested == 0 { 0 } else { EXTENT.max(hot.block() * 2) };
    (requested + extent).min(hot.size())
}

impl VirtioDevice for MemDevice {
    fn kind(&self) -> u16 {
        24
    }

    fn features(&self) -> u64 {
        feature::ACPI_PXM | feature::UNPLUGGED_INACCESSIBLE
    }

    fn queue_sizes(&self) -> &[u16] {
        &[128]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = self.blocks.config();
        let from = usize::try_from(offset).unwrap_or(CONFIG_LEN).min(CONFIG_LEN);
        for (out, byte) in data.iter_mut().zip(config.get(from..).unwrap_or_default()) {
            *out = *byte;
        }
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn update_config(&mut self) -> bool {
        let blocks = &mut self.blocks;
        let wanted = blocks.sizes.requested.load(Ordering::Acquire);
        if wanted == blocks.requested {
            return false;
        }
        blocks.requested = wanted;
        // It shrinks when all is unplugged, and not under a driver that uses it.
        blocks.usable = blocks.usable.max(extent(&blocks.hot, wanted));
        true
    }

    fn activate(&mut self, activation: Activation) -> io::Result<()> {
        self.queue.activate(activation);
        self.run();
        Ok(())
    }

    /// What is plugged stays plugged: only the machine's own reset takes it out (virtio 1.2, 5.15.5.1).
    fn reset(&mut self) {
        self.queue.reset();
    }

    fn inline_queues(&self) -> u64 {
        1
    }

    fn on_kick(&mut self, _queue: u16) {
        self.counters().kick();
        self.run();
    }
}
