// SPDX-License-Identifier: Apache-2.0
//! A vhost-user-blk server on a Unix socket: another monitor lends its guest's memory and queues, and the same virtio block
//! device that tare's own guests have serves them. One client at a time; the next one finds the disk as the last left it.
//!
//! The caller's thread accepts, a thread talks to the client, and the device has its own.

mod backend;
mod fds;

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::{io, thread};

use base::EventFd;
use base::listen::Listening;
use base::news::News;
use base::reactor::Reactor;
use block::Disk;
use vhost::vhost_user::BackendReqHandler;

use crate::Error;
use backend::Backend;

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const ENDED: u64 = 2;
const NEWS: u64 = 3;

/// A server that listens.
pub struct Server {
    listening: Listening,
    backend: Arc<Mutex<Backend>>,
}

impl Server {
    /// Listens at `path`. Nobody is served before [`Server::run`]. `spec` says the serial number.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn bind(path: &Path, disk: Disk, spec: &spec::Disk) -> Result<Self, Error> {
        let listening = Listening::at(path)?;
        Ok(Self { listening, backend: Arc::new(Mutex::new(Backend::new(disk, spec))) })
    }

    /// Serves until `stop` is written to, and prints what the disk says through `news`; then ends the connection after what is in flight, and removes the socket. What
    /// clients did not flush is as durable as the host makes it.
    ///
    /// # Errors
    /// When the socket can't be listened on any more.
    pub fn run(self, stop: &EventFd, news: &News) -> Result<(), Error> {
        self.accept(stop, news).map_err(|source| Error::Io {
            path: self.listening.path().to_owned(),
            what: "listen",
            source,
        })
    }

    fn accept(&self, stop: &EventFd, news: &News) -> io::Result<()> {
        let ended = EventFd::new(base::EFD_NONBLOCK)?;
        let mut reactor = Reactor::new()?;
        reactor.add(stop, STOP)?;
        reactor.add(news, NEWS)?;
        reactor.add(&ended, ENDED)?;
        reactor.add(&self.listening, LISTENER)?;
        let mut client: Option<(thread::JoinHandle<()>, UnixStream)> = None;
        loop {
            let (mut stopped, mut over, mut knocked) = (false, false, false);
            for ready in reactor.turn(None)? {
                stopped |= ready.token == STOP;
                over |= ready.token == ENDED;
                knocked |= ready.token == LISTENER;
            }
            if (over || stopped)
                && let Some((thread, socket)) = client.take()
            {
                // A client that left has no socket to shut down.
                let _ = socket.shutdown(Shutdown::Both);
                // The device is the backend's; the thread takes nothing with it.
                let _ = thread.join();
                if over {
                    let _ = ended.read();
                    reactor.add(&self.listening, LISTENER)?;
                }
            }
            crate::tell(news);
            if stopped {
                return Ok(());
            }
            if knocked && client.is_none() {
                let Some(socket) = self.listening.accept()? else { continue };
                client = Some(self.serve(socket, ended.try_clone()?)?);
                // The next client waits in the socket's queue.
                reactor.remove(&self.listening)?;
            }
        }
    }

    fn serve(&self, socket: UnixStream, ended: EventFd) -> io::Result<(thread::JoinHandle<()>, UnixStream)> {
        let ours = socket.try_clone()?;
        let backend = Arc::clone(&self.backend);
        let thread = thread::Builder::new().name("vhost-user".into()).spawn(move || {
            let mut handler = BackendReqHandler::from_stream(socket, Arc::clone(&backend));
            // Whatever ends it, the client is gone or said what can't be: either way it is over.
            while handler.handle_request().is_ok() {}
            backend::end(&backend);
            // A full counter wakes as well.
            let _ = ended.write(1);
        })?;
        Ok((thread, ours))
    }
}
