// SPDX-License-Identifier: Apache-2.0
//! The server: one thread, one client at a time, one request a connection. The command line binds it once and lets it serve
//! for the length of each run of the machine.

use std::fs::{self, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use base::listen::{Error, Listening};
use base::reactor::Reactor;
use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use spec::{Command, Reply};

use crate::http::{self, Bad, Response};
use crate::routes;

/// How long a client may take to say what it wants; others wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);
/// The thread's stack: JSON of a few fields, and a command's way into the disk engine.
const STACK: usize = 256 << 10;
const STOP: u64 = 0;
const SOCKET: u64 = 1;

/// What does the commands; called on the server's thread, one at a time.
pub type Answer = Box<dyn Fn(Command) -> Reply + Send>;

/// A bound socket; its file goes with it.
pub struct Server {
    listening: Arc<Listening>,
}

impl Server {
    /// Listens at `path`, for the owner alone (mode 0600).
    ///
    /// # Errors
    /// What keeps the socket from being there, in one line.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        let failed = |what| move |source| Error::Io { path: path.to_owned(), what, source };
        let listening = Listening::at(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed("keep others out"))?;
        // Whoever came before the mode was set has no business here.
        while listening.accept().map_err(failed("listen"))?.is_some() {}
        Ok(Self { listening: Arc::new(listening) })
    }

    /// Serves until the result is dropped. The thread has the caller's signal mask.
    ///
    /// # Errors
    /// When the host has no thread or descriptor left.
    pub fn serve(&self, answer: Answer) -> io::Result<Serving> {
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let thread = Thread { listening: Arc::clone(&self.listening), stop: stop.try_clone()?, answer };
        let mut reactor = Reactor::new()?;
        reactor.add(&thread.stop, STOP)?;
        reactor.add(&*thread.listening, SOCKET)?;
        let thread = thread::Builder::new().name("api".into()).stack_size(STACK).spawn(move || {
            // A server that can't wait any more ends; the machine goes on.
            let _ = thread.run(&mut reactor);
        })?;
        Ok(Serving { stop, thread: Some(thread) })
    }
}

/// A server at work. Dropping it waits for the command at hand and ends it.
pub struct Serving {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        // The only failure is a full counter, and then it is readable.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Thread {
    listening: Arc<Listening>,
    stop: EventFd,
    answer: Answer,
}

impl Thread {
    fn run(&self, reactor: &mut Reactor) -> io::Result<()> {
        loop {
            let ready: Vec<_> = reactor.turn(None)?.map(|r| r.token).collect();
            if ready.contains(&STOP) {
                return Ok(());
            }
            match self.listening.accept() {
                // What goes wrong with one client is that client's.
                Ok(Some(client)) => drop(self.talk(client)),
                Ok(None) => {}
                // Out of descriptors: the client waits in the queue, and the loop must not spin on it.
                Err(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// One request and its response.
    fn talk(&self, mut client: UnixStream) -> io::Result<()> {
        client.set_nonblocking(true)?;
        let mut reactor = Reactor::new()?;
        reactor.add(&self.stop, STOP)?;
        reactor.add(&client, SOCKET)?;
        let end = Instant::now() + PATIENCE;
        let mut got = Vec::with_capacity(1024);
        let response = loop {
            match http::parse_request(&got) {
                Ok(Some(request)) => break self.respond(&request),
                Ok(None) => {}
                Err(Bad(code, line)) => break routes::refusal(code, &line),
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break routes::refusal(408, "the request took too long; send it at once");
            }
            let wait = u32::try_from(left.as_millis()).unwrap_or(u32::MAX).saturating_add(1);
            let ready: Vec<_> = reactor.turn(Some(wait))?.map(|r| r.token).collect();
            if ready.contains(&STOP) {
                return Ok(());
            }
            if ready.contains(&SOCKET) && !receive(&mut client, &mut got)? {
                return Ok(());
            }
        };
        // A response fits the socket's buffer; a client that has filled it does without.
        client.write_all(&response.bytes())
    }

    fn respond(&self, request: &http::Request<'_>) -> Response {
        match routes::command(request) {
            Ok(command) => routes::response(&(self.answer)(command)),
            Err(Bad(code, line)) => routes::refusal(code, &line),
        }
    }
}

/// Takes what the client has sent; `false` at its end.
fn receive(client: &mut UnixStream, got: &mut Vec<u8>) -> io::Result<bool> {
    let mut chunk = [0; 4096];
    // The parser refuses what is larger before more than that comes.
    let room = (http::MAX_MESSAGE + 1).saturating_sub(got.len()).min(chunk.len());
    match client.read(chunk.get_mut(..room).unwrap_or_default()) {
        Ok(0) => Ok(false),
        Ok(n) => {
            got.extend_from_slice(chunk.get(..n).unwrap_or_default());
            Ok(true)
        }
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(true),
        Err(e) => Err(e),
    }
}
