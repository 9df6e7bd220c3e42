// SPDX-License-Identifier: Apache-2.0
//! The pool itself: pieces of memory and their states, the threads that zero them, and the loop that lends them.
//!
//! One lock guards the states; a piece that is being zeroed is out of the list meanwhile, so no lock is held over that. The
//! threads run when nobody else wants the CPU (`SCHED_IDLE`): guests go before memory for guests to come.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::listen::Listening;
use base::mmap::{Advice, Mmap};
use base::reactor::{Reactor, Token};
use spec::{Memory, Pages};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::wire::{ASK, Answer, Ask, PIECE, RETURNED};
use crate::Zeroing;
use crate::backing::{enough_huge_pages, memfd};
use crate::ram::MemError;

/// What a pool keeps, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolPlan {
    /// Bytes; a multiple of `piece`.
    pub size: u64,
    /// Bytes of one file; a multiple of a page.
    pub piece: u64,
    /// Its pages.
    pub pages: Pages,
    /// How memory that came back is zeroed.
    pub zero: Zeroing,
    /// Threads that do it.
    pub threads: usize,
}

/// How a piece is.
#[derive(Debug)]
enum State {
    /// Never touched.
    Fresh(Mmap),
    /// It came back with what a guest left in it.
    Dirty(Mmap),
    /// A thread has its mapping.
    Making,
    /// Zero, all of it.
    Ready(Mmap),
    /// A monitor has it, which is known by this token.
    Lent(Mmap, Token),
    /// The host gave no memory for it.
    Broken,
}

struct Piece {
    file: Arc<File>,
    state: State,
}

/// How much of a pool is in which state, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stock {
    /// Zero, and nobody's.
    pub ready: u64,
    /// On its way to that.
    pub coming: u64,
    /// Lent.
    pub lent: u64,
    /// What the host would not give.
    pub broken: u64,
}

struct Inner {
    plan: PoolPlan,
    pieces: Mutex<Vec<Piece>>,
    /// There is something to do, or something was done.
    changed: Condvar,
}

/// A pool. Cloning shares it.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

/// How long one client may keep the others waiting.
const PATIENCE: Duration = Duration::from_secs(1);
/// Token of the listening socket; clients have odd ones from here on, and their processes the even ones that follow.
const LISTENER: Token = 0;

impl Pool {
    /// Makes a pool and starts its threads, which begin to fill it.
    ///
    /// # Errors
    /// [`MemError`] when the host has too few huge pages or no files in memory.
    pub fn new(plan: PoolPlan) -> Result<Self, MemError> {
        if plan.pages.are_reserved() {
            enough_huge_pages(&Memory { size: plan.size, pages: plan.pages, ..Memory::default() })?;
        }
        let pieces = (0..plan.size / plan.piece).map(|_| Piece::new(&plan)).collect::<io::Result<Vec<_>>>();
        let pieces = pieces.map_err(|source| MemError::Map { size: plan.size, source })?;
        let threads = plan.threads;
        let pool = Self(Arc::new(Inner { plan, pieces: Mutex::new(pieces), changed: Condvar::new() }));
        for number in 0..threads {
            let pool = pool.clone();
            let thread = std::thread::Builder::new().name(format!("zero-{number}"));
            thread.spawn(move || pool.fill()).map_err(|source| MemError::Map { size: 0, source })?;
        }
        Ok(pool)
    }

    fn pieces(&self) -> MutexGuard<'_, Vec<Piece>> {
        self.0.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much is in which state.
    #[must_use]
    pub fn stock(&self) -> Stock {
        let mut stock = Stock::default();
        for piece in self.pieces().iter() {
            *match piece.state {
                State::Ready(_) => &mut stock.ready,
                State::Fresh(_) | State::Dirty(_) | State::Making => &mut stock.coming,
                State::Lent(..) => &mut stock.lent,
                State::Broken => &mut stock.broken,
            } += self.0.plan.piece;
        }
        stock
    }

    /// Waits until nothing is on its way any more, and tells `tell` of each step.
    pub fn wait(&self, mut tell: impl FnMut(Stock)) {
        loop {
            let stock = self.stock();
            tell(stock);
            if stock.coming == 0 {
                return;
            }
            let pieces = self.pieces();
            drop(self.0.changed.wait_timeout(pieces, Duration::from_millis(100)));
        }
    }

    /// A thread that makes pieces ready, for ever.
    fn fill(&self) {
        // A kernel that will not have it goes on with a plain thread.
        let _ = base::sched::yield_to_all();
        let mut pieces = self.pieces();
        loop {
            let work = |piece: &Piece| matches!(piece.state, State::Fresh(_) | State::Dirty(_));
            let Some(at) = pieces.iter().position(work) else {
                pieces = self.0.changed.wait(pieces).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let Some(piece) = pieces.get_mut(at) else { continue };
            let (map, dirty) = match std::mem::replace(&mut piece.state, State::Making) {
                State::Fresh(map) => (map, false),
                State::Dirty(map) => (map, true),
                other => {
                    piece.state = other;
                    continue;
                }
            };
            drop(pieces);
            let made = self.make(map, dirty);
            pieces = self.pieces();
            if let Some(piece) = pieces.get_mut(at) {
                piece.state = match made {
                    Ok(map) => State::Ready(map),
                    Err(e) => {
                        let mib = self.0.plan.piece >> 20;
                        base::news::print(&format!("{mib} MiB of the pool can't be had: {e}; it goes on without them"));
                        State::Broken
                    }
                };
            }
            self.0.changed.notify_all();
        }
    }

    /// Makes a piece exist, and zero.
    fn make(&self, mut map: Mmap, dirty: bool) -> io::Result<Mmap> {
        // Also where a guest gave pages of it back: a write to what the host has no page for any more would end the pool.
        match map.populate() {
            Err(e) if e.raw_os_error() != Some(libc::EINVAL) => return Err(e),
            _ => {}
        }
        if dirty {
            let len = map.len();
            self.0.plan.zero.fill(&mut map, 0, len);
        }
        Ok(map)
    }

    /// Takes as many pieces as `size` takes, if there are as many; they are lent to `to` from now on.
    fn lend(&self, size: u64, to: Token) -> (Answer, Vec<Arc<File>>) {
        let plan = &self.0.plan;
        let want = usize::try_from(size.div_ceil(plan.piece)).unwrap_or(usize::MAX);
        let stock = self.stock();
        let mut pieces = self.pieces();
        let ready = pieces.iter().filter(|p| matches!(p.state, State::Ready(_))).count();
        let mut files = Vec::new();
        if ready >= want {
            for piece in pieces.iter_mut() {
                if files.len() == want {
                    break;
                }
                match std::mem::replace(&mut piece.state, State::Making) {
                    State::Ready(map) => {
                        piece.state = State::Lent(map, to);
                        files.push(piece.file.clone());
                    }
                    other => piece.state = other,
                }
            }
        }
        let answer =
            Answer { pieces: files.len() as u64, piece: plan.piece, page: plan.pages.bytes(), free: stock.ready };
        (answer, files)
    }

    /// Takes back what `from` had.
    fn take_back(&self, from: Token) {
        for piece in self.pieces().iter_mut() {
            match std::mem::replace(&mut piece.state, State::Making) {
                State::Lent(map, to) if to == from => piece.state = State::Dirty(map),
                other => piece.state = other,
            }
        }
        self.0.changed.notify_all();
    }

    /// Listens on `socket`, for the owner alone.
    ///
    /// # Errors
    /// When somebody answers there, or the path will not do.
    pub fn listen(socket: &Path) -> Result<Listening, base::listen::Error> {
        Listening::at(socket)
    }

    /// Lends to whoever connects to what [`Pool::listen`] gave. Returns only when the host fails it.
    ///
    /// # Errors
    /// What `epoll` and the listening socket say.
    pub fn serve(&self, listening: Listening) -> io::Result<()> {
        let mut reactor = Reactor::new()?;
        reactor.add(&listening, LISTENER)?;
        let mut clients: HashMap<Token, Client> = HashMap::new();
        let mut next: Token = 1;
        loop {
            let ready: Vec<Token> = reactor.turn(None)?.map(|event| event.token).collect();
            for token in ready {
                if token == LISTENER {
                    let Ok(Some(stream)) = listening.accept() else { continue };
                    let client = Client::new(stream);
                    if reactor.add(&client.stream, next).is_ok() {
                        clients.insert(next, client);
                        next += 2;
                    }
                    continue;
                }
                let of = token - (token + 1) % 2;
                let Some(client) = clients.get_mut(&of) else { continue };
                let step = if token == of { client.read(self, of) } else { Step::Over };
                match step {
                    Step::Goes => {}
                    Step::Over => {
                        clients.remove(&of);
                        self.take_back(of);
                    }
                    Step::Gone => {
                        let _ = reactor.remove(&client.stream);
                        // What the process had in flight may still reach the memory: it comes back when there is no
                        // process any more.
                        let watched =
                            client.process.as_ref().is_some_and(|process| reactor.add(process, of + 1).is_ok());
                        // What can't be watched keeps its memory: lost to the pool, but to nobody else.
                        if !watched {
                            base::news::print("a machine's end can't be watched; the pool goes on without its memory");
                        }
                    }
                }
            }
        }
    }
}

impl Piece {
    fn new(plan: &PoolPlan) -> io::Result<Self> {
        let file = memfd(plan.pages)?;
        file.set_len(plan.piece)?;
        // A monitor can't make the file shorter under the pool's hands.
        base::fd::seal_length(&file)?;
        let len = usize::try_from(plan.piece).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let align = usize::try_from(plan.pages.bytes().max(2 << 20)).unwrap_or(2 << 20);
        let map = Mmap::reserved(len, align)?;
        map.put(0, len, Some((file.as_raw_fd(), 0)), libc::MAP_SHARED)?;
        if plan.pages == Pages::Transparent {
            // Before the first touch. A host without them for files in memory has small ones.
            let _ = map.advise(Advice::HugePages);
        }
        Ok(Self { file: Arc::new(file), state: State::Fresh(map) })
    }
}

/// What comes next for a client.
enum Step {
    /// Nothing special.
    Goes,
    /// It has given back what it had, or had nothing.
    Over,
    /// Its connection is gone, without a word.
    Gone,
}

/// A monitor that is connected.
struct Client {
    stream: UnixStream,
    /// Readable once the process has ended. `None`: it has, or can't be watched and gets nothing.
    process: Option<OwnedFd>,
    has: bool,
}

impl Client {
    fn new(stream: UnixStream) -> Self {
        // A client that neither reads nor writes is dropped after this.
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let _ = stream.set_write_timeout(Some(PATIENCE));
        Self { process: base::fd::peer_process(&stream).ok(), stream, has: false }
    }

    fn read(&mut self, pool: &Pool, token: Token) -> Step {
        if self.has {
            let mut byte = [0];
            return match self.stream.read(&mut byte) {
                Ok(1) if byte == [RETURNED] => Step::Over,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => Step::Goes,
                _ => Step::Gone,
            };
        }
        let mut bytes = [0; ASK];
        let asked = self.stream.read_exact(&mut bytes).and_then(|()| Ask::read(&bytes));
        let (Ok(ask), Some(_)) = (asked, &self.process) else { return Step::Over };
        let (answer, files) = pool.lend(ask.size, token);
        self.has = !files.is_empty();
        let sent = self.stream.write_all(&answer.write()).and_then(|()| {
            let send = |file: &Arc<File>| {
                let sent = self.stream.send_with_fd(&[PIECE][..], file.as_raw_fd());
                sent.map(drop).map_err(|e| io::Error::from_raw_os_error(e.errno()))
            };
            files.iter().try_for_each(send)
        });
        match sent {
            Ok(()) if self.has => Step::Goes,
            // It may have some of the files, and map them.
            Err(_) if self.has => Step::Gone,
            _ => Step::Over,
        }
    }
}
