// SPDX-License-Identifier: Apache-2.0
//! An NBD server on a Unix socket: fixed newstyle handshake, structured replies, `base:allocation`, several connections to
//! one disk (a flush on any covers what all were told is done). No TLS: a socket's file mode says who may connect.
//!
//! The caller's thread accepts; each client has a thread and a handle on the disk of its own ([`block::Disk::share`]), so
//! that connections share nothing but the image.

mod handshake;
mod proto;
mod session;

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use base::EventFd;
use base::listen::Listening;
use base::news::News;
use base::reactor::Reactor;
use block::{Disk, Op};

use crate::Error;
use handshake::About;
use proto::export_flag;
use session::Session;

/// A client that does not finish its handshake, or does not take a reply of it, is sent away after this.
const PATIENCE: Duration = Duration::from_secs(30);
/// Tokens of the accepting thread.
const LISTENER: u64 = 0;
const STOP: u64 = 1;
const ENDED: u64 = 2;
const NEWS: u64 = 3;

/// What is exported, and to how many.
#[derive(Debug)]
pub struct Export {
    /// What clients call it; they reach it by the empty name too.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// The disk, not attached.
    pub disk: Disk,
    /// Connections at one time, at least 1; more wait.
    pub clients: usize,
}

/// A server that listens.
pub struct Server {
    listening: Listening,
    about: About,
    root: Root,
    clients: usize,
}

/// The disk that handles are made of. Where it can't be shared, the one connection borrows it.
struct Root {
    disk: Arc<Mutex<Option<Disk>>>,
    shared: bool,
}

/// A connection as the accepting thread sees it.
struct Connection {
    thread: JoinHandle<()>,
    socket: UnixStream,
    over: Arc<AtomicBool>,
}

/// Tells the accepting thread that a connection is over, however it came to that.
struct Goodbye {
    over: Arc<AtomicBool>,
    ended: Arc<EventFd>,
}

impl Drop for Goodbye {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // A full counter wakes as well.
        let _ = self.ended.write(1);
    }
}

impl Server {
    /// Listens at `path`. Nobody is served before [`Server::run`].
    ///
    /// # Errors
    /// See [`Error`].
    pub fn bind(path: &Path, export: Export) -> Result<Self, Error> {
        let Export { name, description, mut disk, clients } = export;
        let listening = Listening::at(path)?;
        let shared = disk.share().is_ok();
        let mut flags = export_flag::HAS_FLAGS | export_flag::SEND_FLUSH | export_flag::SEND_FUA;
        if disk.readonly() {
            flags |= export_flag::READ_ONLY;
        } else {
            flags |= export_flag::SEND_TRIM | export_flag::SEND_WRITE_ZEROES;
        }
        if shared {
            flags |= export_flag::CAN_MULTI_CONN;
        }
        let about = About {
            name,
            description,
            size: disk.size(),
            flags,
            preferred_block: disk.limits().block_size.max(4096),
            smallest_block: disk.granule() as u32,
            allocation: disk.extents(0, 512).is_ok(),
        };
        let root = Root { disk: Arc::new(Mutex::new(Some(disk))), shared };
        Ok(Self { listening, about, root, clients: if shared { clients.max(1) } else { 1 } })
    }

    /// Serves until `stop` is written to, and prints what the disk says through `news`; then ends all connections, makes everything durable and removes the socket.
    ///
    /// # Errors
    /// When the socket can't be listened on any more, or the last flush fails.
    pub fn run(self, stop: &EventFd, news: &News) -> Result<(), Error> {
        let path = self.listening.path().to_owned();
        let failed = |what| {
            let path = path.clone();
            move |source| Error::Io { path, what, source }
        };
        let ended = Arc::new(EventFd::new(base::EFD_NONBLOCK).map_err(failed("listen"))?);
        let connections = self.accept((stop, news), &ended).map_err(failed("listen"))?;
        for connection in &connections {
            // A client that left has no socket to shut down.
            let _ = connection.socket.shutdown(Shutdown::Both);
        }
        for connection in connections {
            // A thread that died took its handle with it; there is nothing to save.
            let _ = connection.thread.join();
        }
        match self.root.disk.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(disk) if !disk.readonly() => flush(disk).map_err(failed("flush the disk behind it")),
            _ => Ok(()),
        }
    }

    /// Takes clients until `stop`; gives the connections that are left.
    fn accept(&self, (stop, news): (&EventFd, &News), ended: &Arc<EventFd>) -> io::Result<Vec<Connection>> {
        let mut reactor = Reactor::new()?;
        reactor.add(stop, STOP)?;
        reactor.add(news, NEWS)?;
        reactor.add(ended.as_ref(), ENDED)?;
        reactor.add(&self.listening, LISTENER)?;
        let mut connections: Vec<Connection> = Vec::new();
        let mut listens = true;
        let mut number = 0usize;
        loop {
            let wants = connections.len() < self.clients;
            if wants != listens {
                // Those beyond the limit wait in the socket's queue.
                if wants {
                    reactor.add(&self.listening, LISTENER)?
                } else {
                    reactor.remove(&self.listening)?
                }
                listens = wants;
            }
            let (mut stopped, mut knocked) = (false, false);
            for ready in reactor.turn(None)? {
                stopped |= ready.token == STOP;
                knocked |= ready.token == LISTENER;
            }
            crate::tell(news);
            if stopped {
                return Ok(connections);
            }
            let _ = ended.read();
            connections.retain(|c| !c.over.load(Ordering::Acquire));
            if !knocked || connections.len() >= self.clients {
                continue;
            }
            match self.listening.accept() {
                Ok(Some(socket)) => {
                    number += 1;
                    // A host without threads or descriptors left turns this client away; the others go on.
                    if let Ok(connection) = self.connect(socket, number, ended) {
                        connections.push(connection);
                    }
                }
                Ok(None) => {}
                // Out of descriptors: clients wait until some are back.
                Err(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    fn connect(&self, socket: UnixStream, number: usize, ended: &Arc<EventFd>) -> io::Result<Connection> {
        let ours = socket.try_clone()?;
        let over = Arc::new(AtomicBool::new(false));
        let goodbye = Goodbye { over: Arc::clone(&over), ended: Arc::clone(ended) };
        let about = self.about.clone();
        let root = Root { disk: Arc::clone(&self.root.disk), shared: self.root.shared };
        let thread = thread::Builder::new().name(format!("nbd-{number}")).spawn(move || {
            // How a client ends is its own affair: nothing of it is an error of the server.
            let _ = serve(socket, &about, &root);
            drop(goodbye);
        })?;
        Ok(Connection { thread, socket: ours, over })
    }
}

/// One client, from its first byte to its last.
fn serve(mut socket: UnixStream, about: &About, root: &Root) -> io::Result<()> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let Some(agreed) = handshake::greet(&mut socket, about)? else { return Ok(()) };
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(None)?;
    let disk = {
        let mut held = root.disk.lock().unwrap_or_else(PoisonError::into_inner);
        match held.as_ref() {
            Some(disk) if root.shared => Some(disk.share()?),
            _ => held.take(),
        }
    };
    let Some(mut disk) = disk else { return Err(io::ErrorKind::ResourceBusy.into()) };
    let result = Session::new(socket, &mut disk, agreed).and_then(|mut session| session.run());
    if !root.shared {
        *root.disk.lock().unwrap_or_else(PoisonError::into_inner) = Some(disk);
    }
    result
}

/// Makes everything durable, on this thread.
fn flush(mut disk: Disk) -> io::Result<()> {
    let wake = EventFd::new(0)?;
    disk.attach(&wake)?;
    disk.want_wake(true);
    disk.submit(&block::Request { id: 0, op: Op::Flush, offset: 0, len: 0, segs: &[] });
    disk.commit();
    let mut done = Vec::new();
    loop {
        disk.reap(&mut done);
        if let Some(completion) = done.pop() {
            disk.detach();
            return completion.result;
        }
        wake.read()?;
    }
}
