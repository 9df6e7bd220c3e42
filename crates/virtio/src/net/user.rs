// SPDX-License-Identifier: Apache-2.0
//! `user`: a stream socket to passt, which is the guest's router, DHCP and DNS server without any rights on the host. tare
//! starts it, or is given a socket to one. Used on the worker's thread.
//!
//! Each frame goes behind its length, four bytes with the first one highest. A frame and the length of the next are received in
//! one call, the frame straight into guest memory.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use base::Seg;

use super::outbox::{FRAME_MAX, Outbox};
use super::wire::{NetError, Wire};
use super::{FRAME_MIN, HEADER, sys};
use crate::queue::{copy_in, copy_out, window};

/// The most that is read of what passt said.
const WORDS: u64 = 64 << 10;

/// passt as a process of ours.
struct Passt {
    child: Child,
    /// Its standard error.
    said: File,
}

impl Passt {
    fn start(number: usize, guest: OwnedFd, mtu: Option<u16>) -> Result<Self, NetError> {
        let bad = |source| NetError::Passt { number, source };
        let said = sys::memory_file().map_err(bad)?;
        let mut command = Command::new("passt");
        // Its standard input is the socket; it ends with it.
        command.args(["--foreground", "--quiet", "--fd", "0"]);
        if let Some(mtu) = mtu {
            command.args(["--mtu", &mtu.to_string()]);
        }
        let errors = said.try_clone().map_err(bad)?;
        command.stdin(guest).stdout(Stdio::null()).stderr(errors);
        Ok(Self { child: command.spawn().map_err(bad)?, said })
    }

    /// The last line that it said, if any.
    fn last_words(&mut self) -> Option<String> {
        let mut text = Vec::new();
        self.said.rewind().ok()?;
        Read::by_ref(&mut self.said).take(WORDS).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.contains("to syslog"));
        lines.next_back().map(|line| line.chars().filter(|c| !c.is_control()).take(200).collect())
    }
}

impl Drop for Passt {
    fn drop(&mut self) {
        // Whether it has ended already or not: afterwards it has, and is no zombie.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A stream of frames.
pub struct User {
    socket: UnixStream,
    passt: Option<Passt>,
    /// The length of the next frame, as far as it is here.
    prefix: [u8; 4],
    have: usize,
    /// The frame that is being received, and how much of it is here.
    frame: Option<usize>,
    body: usize,
    /// Bytes of an earlier frame that nobody wants.
    unwanted: usize,
    /// The rest of a frame that was sent in part when its driver went.
    owed: Vec<u8>,
    segs: Vec<Seg>,
    moved: u64,
}

impl User {
    /// Starts passt for NIC `number`.
    ///
    /// # Errors
    /// [`NetError::Passt`] where it is not installed or the host is out of something.
    pub fn start(number: usize, mtu: Option<u16>) -> Result<Self, NetError> {
        let (socket, guest) = UnixStream::pair().map_err(|source| NetError::Passt { number, source })?;
        let passt = Passt::start(number, guest.into(), mtu)?;
        Ok(Self { passt: Some(passt), ..Self::new(socket) })
    }

    /// Uses the connected stream socket behind descriptor `fd`, which the user passed in.
    ///
    /// # Errors
    /// [`NetError::Descriptor`].
    pub fn adopt(number: usize, fd: u32) -> Result<Self, NetError> {
        let want = "a connected stream socket";
        match sys::duplicate(fd) {
            Ok(own) if sys::is_stream(&own) => Ok(Self::new(own.into())),
            _ => Err(NetError::Descriptor { number, fd, want }),
        }
    }

    /// Uses `socket`.
    #[must_use]
    pub fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            passt: None,
            prefix: [0; 4],
            have: 0,
            frame: None,
            body: 0,
            unwanted: 0,
            owed: Vec::new(),
            segs: Vec::new(),
            moved: 0,
        }
    }

    /// Receives into `segs`; the end of the stream is an error.
    fn take(&mut self, segs: &[Seg]) -> io::Result<usize> {
        match sys::receive(&self.socket, segs)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            got => {
                self.moved += got as u64;
                Ok(got)
            }
        }
    }

    fn rest_of_prefix(&mut self) -> Seg {
        Seg { ptr: self.prefix.as_mut_ptr().wrapping_add(self.have), len: self.prefix.len() - self.have }
    }

    fn drop_unwanted(&mut self) -> io::Result<()> {
        let mut nowhere = [0; 4096];
        while self.unwanted > 0 {
            let segs = [Seg { ptr: nowhere.as_mut_ptr(), len: nowhere.len().min(self.unwanted) }];
            self.unwanted -= self.take(&segs)?;
        }
        Ok(())
    }

    fn pay_owed(&mut self) -> io::Result<()> {
        while !self.owed.is_empty() {
            let segs = [Seg { ptr: self.owed.as_mut_ptr(), len: self.owed.len() }];
            let gone = sys::send(&self.socket, &segs)?;
            self.moved += gone as u64;
            self.owed.drain(..gone);
        }
        Ok(())
    }
}

impl Wire for User {
    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn features(&self) -> u64 {
        0
    }

    fn outbox(&self) -> Outbox {
        Outbox::framed()
    }

    fn accept_offloads(&mut self, _features: u64) -> io::Result<()> {
        Ok(())
    }

    fn longest(&self) -> usize {
        HEADER + self.frame.unwrap_or(FRAME_MAX)
    }

    fn want(&mut self, _room: usize) -> io::Result<usize> {
        self.drop_unwanted()?;
        loop {
            if let Some(len) = self.frame {
                return Ok(HEADER + len);
            }
            if self.have < self.prefix.len() {
                let segs = [self.rest_of_prefix()];
                self.have += self.take(&segs)?;
                continue;
            }
            let len = u32::from_be_bytes(self.prefix) as usize;
            if !(FRAME_MIN..=FRAME_MAX).contains(&len) {
                let what = format!("it announced a frame of {len} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            (self.frame, self.body, self.have) = (Some(len), 0, 0);
        }
    }

    fn receive(&mut self, room: &[Seg]) -> io::Result<usize> {
        let len = self.frame.ok_or(io::ErrorKind::WouldBlock)?;
        if self.body == 0 {
            copy_in(room, 0, &[0; HEADER]);
        }
        loop {
            let mut segs = std::mem::take(&mut self.segs);
            segs.clear();
            window(room, (HEADER + self.body) as u32, (len - self.body) as u32, &mut segs);
            segs.push(self.rest_of_prefix());
            let got = self.take(&segs);
            self.segs = segs;
            let (got, left) = (got?, len - self.body);
            if got >= left {
                (self.frame, self.have) = (None, got - left);
                return Ok(HEADER + len);
            }
            self.body += got;
        }
    }

    fn skip(&mut self) {
        if let Some(len) = self.frame.take() {
            self.unwanted = len - self.body;
        }
    }

    fn send(&mut self, out: &mut Outbox) -> io::Result<()> {
        self.pay_owed()?;
        while !out.is_empty() {
            let gone = sys::send(&self.socket, out.all())?;
            self.moved += gone as u64;
            out.advance(gone);
        }
        Ok(())
    }

    fn progress(&self) -> (u64, bool) {
        (self.moved, self.frame.is_some() || self.have > 0 || self.unwanted > 0)
    }

    fn suspend(&mut self, out: &mut Outbox) {
        self.skip();
        if let Some(segs) = out.begun() {
            let mut rest = vec![0; segs.iter().map(|seg| seg.len).sum()];
            copy_out(segs, 0, &mut rest);
            self.owed.append(&mut rest);
        }
        out.clear();
    }

    fn epitaph(&mut self, error: &io::Error) -> String {
        let said = self.passt.as_mut().and_then(Passt::last_words);
        let who = if self.passt.take().is_some() { "passt" } else { "the other end of the socket" };
        match (error.kind(), said) {
            (io::ErrorKind::InvalidData, _) => format!("{who} does not keep to its protocol, {error}"),
            (_, Some(said)) => format!("{who} ended, it said `{said}`"),
            (io::ErrorKind::UnexpectedEof, None) => format!("{who} ended"),
            (_, None) => format!("{who} failed, {error}"),
        }
    }
}
