// SPDX-License-Identifier: Apache-2.0
//! The transmission phase of one connection: requests in, replies out, in whatever order the disk is done with them. One
//! thread owns the socket and a handle on the disk, and shares nothing.
//!
//! A payload moves once between the socket and a buffer and once between the buffer and the disk. While a client writes,
//! one call takes a payload and the header behind it; while it reads, one call takes all the headers there are, and one
//! sends all the replies that are due.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::net::UnixStream;

use base::EventFd;
use base::reactor::Reactor;
use block::{Completion, Disk, ExtentKind, Op};

use super::handshake::Agreed;
use super::proto::{self, Head, REQUEST_LEN, Request, chunk, command, command_flag, error, state};
use crate::buffer::Buffer;
use crate::socket::{self, Got};

/// Requests in flight on one connection.
const SLOTS: u16 = 128;
/// Bytes of payload in flight on one connection, the last request excepted: what a client can make us allocate.
const BUDGET: usize = 32 << 20;
/// Headers taken at once.
const INBOX: usize = 64 * REQUEST_LEN;
/// Extents told in one reply.
const MOST_EXTENTS: usize = 8192;

/// One request, from its header to its reply.
#[derive(Default)]
struct Slot {
    request: Option<Request>,
    buffer: Buffer,
    /// Decided without the disk; a payload is still to be taken.
    refused: Option<u32>,
    /// The write is done and the flush that `FUA` asks for is not.
    flushing: bool,
}

/// Where the stream from the client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    Header,
    /// The payload of a slot; so many bytes of it are there.
    Payload(u16, usize),
    /// Nothing more: the client said goodbye, or broke the protocol. What is in flight is finished.
    Nothing,
}

/// A reply that is due.
struct Reply {
    head: Head,
    slot: u16,
    /// Bytes after the head.
    body: Body,
}

enum Body {
    None,
    /// The slot's buffer.
    Payload,
    /// Made for this reply.
    Own(Vec<u8>),
}

/// Bytes received and not parsed: `bytes[parsed..filled]`.
struct Inbox {
    bytes: Box<[u8; INBOX]>,
    parsed: usize,
    filled: usize,
}

impl Inbox {
    fn waiting(&self) -> &[u8] {
        self.bytes.get(self.parsed..self.filled).unwrap_or_default()
    }

    /// Moves what waits to the front; the room behind it, up to `most` bytes in all.
    fn room(&mut self, most: usize) -> &mut [u8] {
        self.bytes.copy_within(self.parsed..self.filled, 0);
        (self.parsed, self.filled) = (0, self.filled - self.parsed);
        self.bytes.get_mut(self.filled..most).unwrap_or_default()
    }
}

/// A connection.
pub struct Session<'d> {
    socket: UnixStream,
    disk: &'d mut Disk,
    wake: EventFd,
    reactor: Reactor,
    agreed: Agreed,
    slots: Vec<Slot>,
    free: Vec<u16>,
    inbox: Inbox,
    expect: Expect,
    /// The last request was a write: the bytes after the next header are a payload, not headers.
    writing: bool,
    payload_in_flight: usize,
    in_flight: usize,
    done: Vec<Completion>,
    replies: Vec<Reply>,
}

impl<'d> Session<'d> {
    /// Takes over a socket after its handshake; `disk` is this thread's handle.
    ///
    /// # Errors
    /// When the host has no descriptors or memory left.
    pub fn new(socket: UnixStream, disk: &'d mut Disk, agreed: Agreed) -> io::Result<Self> {
        let wake = EventFd::new(base::EFD_NONBLOCK)?;
        let reactor = Reactor::new()?;
        reactor.add(&socket, 0)?;
        reactor.add(&wake, 1)?;
        disk.attach(&wake)?;
        disk.want_wake(false);
        Ok(Self {
            socket,
            disk,
            wake,
            reactor,
            agreed,
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            free: (0..SLOTS).rev().collect(),
            inbox: Inbox { bytes: Box::new([0; INBOX]), parsed: 0, filled: 0 },
            expect: Expect::Header,
            writing: false,
            payload_in_flight: 0,
            in_flight: 0,
            done: Vec::new(),
            replies: Vec::new(),
        })
    }

    /// Serves until the client is done.
    ///
    /// # Errors
    /// Those of the socket. The disk is detached either way, when the session is dropped.
    pub fn run(&mut self) -> io::Result<()> {
        loop {
            let heard = if self.expect != Expect::Nothing && self.has_room() {
                // With nothing in flight there is nothing else to wait for.
                self.receive(self.in_flight == 0 && self.replies.is_empty())?
            } else {
                false
            };
            self.disk.commit();
            let answered = self.collect();
            self.send()?;
            if self.expect == Expect::Nothing && self.in_flight == 0 {
                return Ok(());
            }
            if !heard && !answered && self.in_flight > 0 {
                self.sleep()?;
            }
        }
    }

    /// Whether one more request could be taken.
    fn has_room(&self) -> bool {
        matches!(self.expect, Expect::Payload(..)) || (!self.free.is_empty() && self.payload_in_flight < BUDGET)
    }

    /// Waits for the disk, and for the client while it may ask for more.
    fn sleep(&mut self) -> io::Result<()> {
        self.disk.want_wake(true);
        self.disk.reap(&mut self.done);
        if self.done.is_empty() {
            let listens = self.expect != Expect::Nothing && self.has_room();
            if !listens {
                // What the client sends meanwhile must not wake us.
                self.reactor.remove(&self.socket)?;
            }
            self.reactor.turn(None)?.for_each(drop);
            if !listens {
                self.reactor.add(&self.socket, 0)?;
            }
        }
        // Nothing to read is fine: the client woke us.
        let _ = self.wake.read();
        self.disk.want_wake(false);
        Ok(())
    }

    /// Takes what the socket has and starts the requests that are complete; whether there was anything.
    fn receive(&mut self, wait: bool) -> io::Result<bool> {
        // What was received earlier and had no room.
        if self.parse() {
            return Ok(true);
        }
        let most = if self.writing { REQUEST_LEN } else { INBOX };
        let (slots, inbox) = (&mut self.slots, self.inbox.room(most));
        let (got, into_payload) = match self.expect {
            Expect::Payload(slot, have) => {
                let rest = slots.get_mut(usize::from(slot)).and_then(|s| s.buffer.bytes_mut().get_mut(have..));
                let rest = rest.unwrap_or_default();
                let len = rest.len();
                let parts = &mut [IoSliceMut::new(rest), IoSliceMut::new(inbox)];
                (socket::receive(&self.socket, parts, wait)?, len)
            }
            _ => (socket::receive(&self.socket, &mut [IoSliceMut::new(inbox)], wait)?, 0),
        };
        match got {
            Got::Nothing => Ok(false),
            Got::Closed => {
                self.give_up();
                Ok(true)
            }
            Got::Bytes(n) => {
                if let Expect::Payload(slot, have) = self.expect {
                    self.expect = Expect::Payload(slot, have + n.min(into_payload));
                    self.inbox.filled += n.saturating_sub(into_payload);
                    if n >= into_payload {
                        self.begin(slot);
                    }
                } else {
                    self.inbox.filled += n;
                }
                self.parse();
                Ok(true)
            }
        }
    }

    /// The client left or broke the protocol: no more is taken from it, a payload half there is dropped.
    fn give_up(&mut self) {
        if let Expect::Payload(slot, _) = self.expect {
            self.release(slot);
        }
        self.expect = Expect::Nothing;
    }

    /// Turns received bytes into requests, as far as there are bytes and room; whether there was a request.
    fn parse(&mut self) -> bool {
        let mut any = false;
        while self.expect == Expect::Header && self.has_room() {
            let waiting = self.inbox.waiting();
            let Some(header) = waiting.first_chunk::<REQUEST_LEN>() else { break };
            any = true;
            match Request::parse(header) {
                Some(request) => {
                    self.inbox.parsed += REQUEST_LEN;
                    self.take(request);
                }
                None => self.give_up(),
            }
        }
        any
    }

    /// Finds a slot for a request and starts it, or waits for its payload.
    fn take(&mut self, request: Request) {
        if request.command == command::DISCONNECT {
            self.expect = Expect::Nothing;
            return;
        }
        let Some(slot) = self.free.pop() else { return };
        let refused = self.judge(&request).err();
        self.writing = request.command == command::WRITE;
        let payload = match request.command {
            command::WRITE => request.len,
            command::READ if refused.is_none() => request.len,
            _ => 0,
        };
        // A longer write can't be skipped in reasonable time; a longer read was refused.
        if payload > proto::MAX_PAYLOAD {
            self.expect = Expect::Nothing;
            self.free.push(slot);
            return;
        }
        let Some(at) = self.slots.get_mut(usize::from(slot)) else { return };
        (at.request, at.refused, at.flushing) = (Some(request), refused, false);
        if !at.buffer.fit(payload as usize) {
            at.refused = Some(error::ENOMEM);
            if self.writing {
                // A payload that nothing can take can't be skipped either.
                self.give_up();
                self.release(slot);
                return;
            }
        }
        self.payload_in_flight += at.buffer.bytes().len();
        if !self.writing || payload == 0 {
            self.begin(slot);
            return;
        }
        // The first bytes may have come with the header.
        let waiting = self.inbox.waiting();
        let have = waiting.len().min(payload as usize);
        if let (Some(to), Some(from)) = (at.buffer.bytes_mut().get_mut(..have), waiting.get(..have)) {
            to.copy_from_slice(from);
        }
        self.inbox.parsed += have;
        if have == payload as usize {
            self.begin(slot);
        } else {
            self.expect = Expect::Payload(slot, have);
        }
    }

    /// What is wrong with a request, as NBD's error.
    fn judge(&self, request: &Request) -> Result<(), u32> {
        let allowed = match request.command {
            command::READ if self.agreed.structured => command_flag::DF | command_flag::FUA,
            command::READ => command_flag::FUA,
            command::WRITE | command::TRIM => command_flag::FUA,
            command::WRITE_ZEROES => command_flag::FUA | command_flag::NO_HOLE,
            // The range is reserved.
            command::FLUSH => return if request.flags & !command_flag::FUA == 0 { Ok(()) } else { Err(error::EINVAL) },
            command::BLOCK_STATUS if self.agreed.allocation => command_flag::REQ_ONE | command_flag::FUA,
            _ => return Err(error::EINVAL),
        };
        if request.flags & !allowed != 0 {
            return Err(error::EINVAL);
        }
        let writes = matches!(request.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        if writes && self.disk.readonly() {
            return Err(error::EPERM);
        }
        if request.offset.checked_add(request.len.into()).is_none_or(|end| end > self.disk.size()) {
            return Err(if writes { error::ENOSPC } else { error::EINVAL });
        }
        if request.command == command::READ && request.len > proto::MAX_PAYLOAD {
            return Err(error::EOVERFLOW);
        }
        if request.command == command::BLOCK_STATUS && request.len == 0 {
            return Err(error::EINVAL);
        }
        Ok(())
    }

    /// Starts a request that is all there.
    fn begin(&mut self, slot: u16) {
        if matches!(self.expect, Expect::Payload(..)) {
            self.expect = Expect::Header;
        }
        let Some(at) = self.slots.get_mut(usize::from(slot)) else { return };
        let Some(request) = at.request else { return };
        if let Some(error) = at.refused {
            return self.fail(slot, error);
        }
        if request.command == command::BLOCK_STATUS {
            return self.tell_status(slot, &request);
        }
        let op = match request.command {
            command::READ => Op::Read,
            command::WRITE => Op::Write,
            command::TRIM => Op::Discard,
            command::WRITE_ZEROES => Op::WriteZeroes { unmap: request.flags & command_flag::NO_HOLE == 0 },
            _ => Op::Flush,
        };
        if request.len == 0 && op != Op::Flush {
            return self.succeed(slot);
        }
        let segs = [at.buffer.seg()];
        let segs = if matches!(op, Op::Read | Op::Write) { &segs[..] } else { &[] };
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (request.offset, request.len.into()) };
        self.in_flight += 1;
        self.disk.submit(&block::Request { id: slot, op, offset, len, segs });
    }

    /// Books what the disk is done with; whether there was anything.
    fn collect(&mut self) -> bool {
        self.disk.reap(&mut self.done);
        let mut done = std::mem::take(&mut self.done);
        let any = !done.is_empty();
        for completion in done.drain(..) {
            self.in_flight -= 1;
            match completion.result {
                Ok(()) => self.advance(completion.id),
                Err(e) => self.fail(completion.id, proto::wire_error(&e)),
            }
        }
        self.done = done;
        any
    }

    /// The disk did its part: a write with `FUA` goes on to a flush, everything else is answered.
    fn advance(&mut self, slot: u16) {
        let Some(at) = self.slots.get_mut(usize::from(slot)) else { return };
        let durable = at.request.is_some_and(|r| {
            let writes = matches!(r.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
            writes && r.flags & command_flag::FUA != 0
        });
        if durable && !at.flushing {
            at.flushing = true;
            self.in_flight += 1;
            self.disk.submit(&block::Request { id: slot, op: Op::Flush, offset: 0, len: 0, segs: &[] });
            self.disk.commit();
        } else {
            self.succeed(slot);
        }
    }

    fn succeed(&mut self, slot: u16) {
        let Some(request) = self.slots.get(usize::from(slot)).and_then(|s| s.request) else { return };
        let (head, body) = match (request.command == command::READ, self.agreed.structured) {
            (true, true) if request.len > 0 => {
                let head = Head::chunk(chunk::OFFSET_DATA, request.cookie, request.len + 8);
                (head.put(&request.offset.to_be_bytes()), Body::Payload)
            }
            (true, true) => (Head::chunk(chunk::NONE, request.cookie, 0), Body::None),
            (true, false) => (Head::simple(0, request.cookie), Body::Payload),
            (false, _) => (Head::simple(0, request.cookie), Body::None),
        };
        self.replies.push(Reply { head, slot, body });
    }

    fn fail(&mut self, slot: u16, error: u32) {
        let Some(request) = self.slots.get(usize::from(slot)).and_then(|s| s.request) else { return };
        let chunked = self.agreed.structured && matches!(request.command, command::READ | command::BLOCK_STATUS);
        let head = if chunked {
            Head::chunk(chunk::ERROR, request.cookie, 6).put(&error.to_be_bytes()).put(&[0, 0])
        } else {
            Head::simple(error, request.cookie)
        };
        self.replies.push(Reply { head, slot, body: Body::None });
    }

    /// Answers `BLOCK_STATUS`: asks the disk, which waits for what it has to look up.
    fn tell_status(&mut self, slot: u16, request: &Request) {
        let extents = match self.disk.extents(request.offset, request.len.into()) {
            Ok(extents) => extents,
            Err(e) => return self.fail(slot, proto::wire_error(&e)),
        };
        let most = if request.flags & command_flag::REQ_ONE != 0 { 1 } else { MOST_EXTENTS };
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for extent in extents {
            let flags = match extent.kind {
                ExtentKind::Data => 0,
                ExtentKind::Zero | ExtentKind::Hole => state::HOLE | state::ZERO,
            };
            // No run is longer than the request, whose length has 32 bits.
            let len = u32::try_from(extent.len).unwrap_or(u32::MAX);
            let full = runs.len() == most;
            match runs.last_mut() {
                Some((run, same)) if *same == flags => *run = run.saturating_add(len),
                _ if full => break,
                _ => runs.push((len, flags)),
            }
        }
        let mut content = proto::ALLOCATION_ID.to_be_bytes().to_vec();
        content.extend(runs.iter().flat_map(|(len, flags)| [len.to_be_bytes(), flags.to_be_bytes()]).flatten());
        let head = Head::chunk(chunk::BLOCK_STATUS, request.cookie, content.len() as u32);
        self.replies.push(Reply { head, slot, body: Body::Own(content) });
    }

    /// Sends the replies that are due and frees their slots.
    fn send(&mut self) -> io::Result<()> {
        if self.replies.is_empty() {
            return Ok(());
        }
        let replies = std::mem::take(&mut self.replies);
        let mut parts = Vec::with_capacity(2 * replies.len());
        for reply in &replies {
            parts.push(IoSlice::new(reply.head.bytes()));
            match (&reply.body, self.slots.get(usize::from(reply.slot))) {
                (Body::Payload, Some(slot)) => parts.push(IoSlice::new(slot.buffer.bytes())),
                (Body::Own(content), _) => parts.push(IoSlice::new(content)),
                _ => {}
            }
        }
        let sent = socket::send_all(&self.socket, &mut parts);
        drop(parts);
        for reply in &replies {
            self.release(reply.slot);
        }
        self.replies = replies;
        self.replies.clear();
        sent
    }

    fn release(&mut self, slot: u16) {
        let Some(at) = self.slots.get_mut(usize::from(slot)) else { return };
        if at.request.take().is_some() {
            self.payload_in_flight -= at.buffer.bytes().len();
            at.buffer.release();
            self.free.push(slot);
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        // The disk must be done with the buffers before they go.
        self.disk.detach();
    }
}
