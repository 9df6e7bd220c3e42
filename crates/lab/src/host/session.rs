// SPDX-License-Identifier: Apache-2.0
//! The lab's half of a mailbox session: run a command in the machine, send it files, take files from it.
//!
//! A session owns one channel of a mailbox file through a lock on one byte of that file, so that several processes can
//! use one machine. It never waits for a machine that is gone: every loop asks the caller's [`Watch`].

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use agent::mailbox::{self, CHANNELS, Mailbox};
use agent::wire::{Decoder, Ended, Exec, Frame, HEAD, Kind, head};
use anyhow::{Context, Result, bail};

const NAP: Duration = Duration::from_millis(1);
const PIECE: usize = 256 << 10;

/// How long to wait, and what may end the wait early.
pub struct Watch<'a> {
    /// The end of all waiting.
    pub deadline: Instant,
    /// Fails when the machine has ended or the user wants out.
    pub check: &'a mut dyn FnMut() -> Result<()>,
}

impl Watch<'_> {
    /// Sleeps for a moment, unless the wait is over.
    ///
    /// # Errors
    /// When it is: the deadline has passed or the check fails.
    pub fn nap(&mut self, what: &str) -> Result<()> {
        (self.check)()?;
        if Instant::now() > self.deadline {
            bail!("the lab machine did not answer in time ({what})");
        }
        std::thread::sleep(NAP);
        Ok(())
    }
}

/// Takes what a command writes.
pub type Sink<'a> = &'a mut dyn FnMut(Stream, &[u8]) -> Result<()>;

/// Which of a command's two outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// How a command in the machine ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Exit code, or 128 plus the signal.
    pub code: i32,
    /// ns of the machine's clock that it took.
    pub clock_ns: u64,
    /// The machine's own limit ended it.
    pub timed_out: bool,
}

/// An open session.
#[derive(Debug)]
pub struct Session {
    mailbox: Mailbox,
    index: usize,
    number: u64,
    decoder: Decoder,
    _lock: File,
}

impl Session {
    /// Takes a free channel of the mailbox in `path` and prepares it: requests may be queued before [`Session::start`].
    ///
    /// # Errors
    /// When all channels are in use or the machine does not let go of an abandoned session.
    pub fn prepare(path: &Path, watch: &mut Watch<'_>) -> Result<Self> {
        let file =
            File::options().read(true).write(true).open(path).with_context(|| format!("open {}", path.display()))?;
        if file.metadata()?.len() != mailbox::SIZE as u64 {
            bail!("{} is no mailbox of this version: run `tare-lab host down`, then `up`", path.display());
        }
        let mailbox = Mailbox::map(&file, 0)?;
        let index = (0..CHANNELS)
            .find(|index| lock_byte(&file, *index))
            .with_context(|| format!("all {CHANNELS} channels to the lab machine are in use: try again later"))?;
        let number = u64::from(std::process::id()) << 32 | u64::from(rand_word());
        let session = Self { mailbox, index, number, decoder: Decoder::default(), _lock: file };
        let channel = session.mailbox.channel(index);
        channel.want(0);
        while channel.served() != 0 {
            watch.nap("ending an abandoned session")?;
        }
        channel.clear();
        Ok(session)
    }

    /// Lets the agent begin; does not wait for it.
    pub fn start(&self) {
        self.mailbox.channel(self.index).want(self.number);
    }

    /// Waits until the agent serves this session.
    ///
    /// # Errors
    /// [`Watch`]'s.
    pub fn await_served(&self, watch: &mut Watch<'_>) -> Result<()> {
        while self.mailbox.channel(self.index).served() != self.number {
            watch.nap("opening a session")?;
        }
        Ok(())
    }

    /// The machine's monotonic clock, ns, as the agent last wrote it.
    #[must_use]
    pub fn clock(&self) -> u64 {
        self.mailbox.clock()
    }

    /// Ends the session and waits until the agent has let go.
    ///
    /// # Errors
    /// [`Watch`]'s.
    pub fn close(self, watch: &mut Watch<'_>) -> Result<()> {
        self.mailbox.channel(self.index).want(0);
        while self.mailbox.channel(self.index).served() != 0 {
            watch.nap("closing a session")?;
        }
        Ok(())
    }

    fn send(&self, kind: Kind, arg: u64, payload: &[u8], watch: &mut Watch<'_>) -> Result<()> {
        let ring = self.mailbox.channel(self.index).down();
        for mut bytes in [&head(kind, arg, payload.len())[..], payload] {
            while !bytes.is_empty() {
                match ring.write(bytes) {
                    0 => {
                        self.start();
                        watch.nap("sending")?;
                    }
                    count => bytes = &bytes[count..],
                }
            }
        }
        Ok(())
    }

    fn receive(&mut self, watch: &mut Watch<'_>) -> Result<Frame> {
        let mut piece = vec![0; PIECE];
        loop {
            match self.try_receive(&mut piece)? {
                Some(frame) => return Ok(frame),
                None => watch.nap("waiting for an answer")?,
            }
        }
    }

    fn try_receive(&mut self, piece: &mut [u8]) -> Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(Some(frame));
            }
            match self.mailbox.channel(self.index).up().read(piece) {
                0 => return Ok(None),
                count => self.decoder.feed(&piece[..count]),
            }
        }
    }

    /// Queues a file for the machine; [`Session::await_put`] later tells whether it arrived. Holes stay holes.
    ///
    /// # Errors
    /// When the file can't be read, or [`Watch`]'s.
    pub fn queue_put(&self, source: &Path, target: &str, mode: u32, watch: &mut Watch<'_>) -> Result<()> {
        let file = File::open(source).with_context(|| format!("open {}", source.display()))?;
        let size = file.metadata()?.len();
        self.send(Kind::Put, mode.into(), target.as_bytes(), watch)?;
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        while at < size {
            let Some((start, end)) = data_after(&file, at, size) else { break };
            at = start;
            while at < end {
                let want = piece.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
                let count = std::os::unix::fs::FileExt::read_at(&file, &mut piece[..want], at)?;
                if count == 0 {
                    bail!("{} became shorter while it was read", source.display());
                }
                if piece[..count].iter().any(|byte| *byte != 0) {
                    self.send(Kind::Data, at, &piece[..count], watch)?;
                }
                at += count as u64;
            }
        }
        self.send(Kind::End, size, &[], watch)
    }

    /// Waits for the answer to a queued file.
    ///
    /// # Errors
    /// What went wrong in the machine, or [`Watch`]'s.
    pub fn await_put(&mut self, watch: &mut Watch<'_>) -> Result<()> {
        let frame = self.receive(watch)?;
        match frame.kind {
            Kind::End => Ok(()),
            _ => Err(refusal(&frame)),
        }
    }

    /// Queues a command; [`Session::await_exit`] follows.
    ///
    /// # Errors
    /// [`Watch`]'s.
    pub fn queue_exec(&self, exec: &Exec, watch: &mut Watch<'_>) -> Result<()> {
        self.send(Kind::Exec, 0, &exec.encode(), watch)?;
        if exec.quiet { Ok(()) } else { self.send(Kind::Stdin, 0, &[], watch) }
    }

    /// Carries a command's output to `sink` until it ends.
    ///
    /// # Errors
    /// What the machine or `sink` says, or [`Watch`]'s.
    pub fn await_exit(&mut self, sink: Sink<'_>, watch: &mut Watch<'_>) -> Result<Exit> {
        self.await_exit_with(sink, &|| 0, watch)
    }

    /// As [`Session::await_exit`]; passes on the signals that `signal` gives (0 for none) to the command's process group.
    ///
    /// # Errors
    /// As [`Session::await_exit`].
    pub fn await_exit_with(&mut self, sink: Sink<'_>, signal: &dyn Fn() -> i32, watch: &mut Watch<'_>) -> Result<Exit> {
        let mut piece = vec![0; PIECE];
        loop {
            let Some(frame) = self.try_receive(&mut piece)? else {
                match signal() {
                    0 => watch.nap("waiting for a command to end")?,
                    signal => self.send(Kind::Kill, u64::try_from(signal).unwrap_or(9), &[], watch)?,
                }
                continue;
            };
            match frame.kind {
                Kind::Stdout => sink(Stream::Out, &frame.payload)?,
                Kind::Stderr => sink(Stream::Err, &frame.payload)?,
                Kind::Exit => {
                    let Ended { clock_ns, timed_out } = Ended::decode(&frame.payload)?;
                    return Ok(Exit { code: i32::try_from(frame.arg).unwrap_or(255), clock_ns, timed_out });
                }
                _ => return Err(refusal(&frame)),
            }
        }
    }

    /// Takes a file from the machine.
    ///
    /// # Errors
    /// When it can't be read there or written here, or [`Watch`]'s.
    pub fn get(&mut self, source: &str, target: &Path, watch: &mut Watch<'_>) -> Result<()> {
        let file = File::create(target).with_context(|| format!("create {}", target.display()))?;
        self.send(Kind::Get, 0, source.as_bytes(), watch)?;
        loop {
            let frame = self.receive(watch)?;
            match frame.kind {
                Kind::Data => std::os::unix::fs::FileExt::write_all_at(&file, &frame.payload, frame.arg)
                    .with_context(|| format!("write {}", target.display()))?,
                Kind::End => return Ok(file.set_len(frame.arg)?),
                _ => return Err(refusal(&frame)),
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.mailbox.channel(self.index).want(0);
    }
}

fn refusal(frame: &Frame) -> anyhow::Error {
    match frame.kind {
        Kind::Error => anyhow::anyhow!("in the lab machine: {}", String::from_utf8_lossy(&frame.payload)),
        kind => anyhow::anyhow!("the lab machine answered out of turn ({kind:?})"),
    }
}

/// The next stretch of data in `file` at or after `at`; all of the rest where holes can't be seen.
fn data_after(file: &File, at: u64, size: u64) -> Option<(u64, u64)> {
    let seek = |from: u64, whence| {
        // SAFETY: plain system call on a descriptor we borrow.
        let at = unsafe { libc::lseek(file.as_raw_fd(), i64::try_from(from).unwrap_or(i64::MAX), whence) };
        u64::try_from(at).map_err(|_| std::io::Error::last_os_error())
    };
    match seek(at, libc::SEEK_DATA) {
        Ok(start) => Some((start, seek(start, libc::SEEK_HOLE).unwrap_or(size).min(size))),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => None,
        Err(_) => Some((at, size)),
    }
}

/// Locks byte `index` of `file` for this open file; false when another holds it.
fn lock_byte(file: &File, index: usize) -> bool {
    // SAFETY: flock is plain data; all-zero is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = i64::try_from(index).unwrap_or(0);
    lock.l_len = 1;
    // SAFETY: a valid descriptor and a valid flock on the stack.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) == 0 }
}

/// Something that differs from the last session of this process; never read as randomness.
fn rand_word() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

const _: () = assert!(HEAD == 16 && PIECE <= agent::wire::MAX_PAYLOAD);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// A mailbox served by the real agent code in a thread of this process.
    struct Loopback {
        path: PathBuf,
        over: Arc<AtomicBool>,
        thread: Option<std::thread::JoinHandle<()>>,
    }

    impl Loopback {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tare-lab-loop-{name}-{}", std::process::id()));
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
            file.set_len(mailbox::SIZE as u64).unwrap();
            let over = Arc::new(AtomicBool::new(false));
            let stop = Arc::clone(&over);
            let thread = std::thread::spawn(move || {
                let mailbox = Mailbox::map(&file, 0).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    mailbox.announce(1);
                    for channel in (0..CHANNELS).map(|index| mailbox.channel(index)) {
                        let wanted = channel.wanted();
                        if wanted != channel.served() {
                            channel.serve(wanted);
                            if wanted != 0 {
                                let _ = agent::session::serve(channel, wanted);
                            }
                        }
                    }
                    std::thread::sleep(NAP);
                }
            });
            Self { path, over, thread: Some(thread) }
        }
    }

    impl Drop for Loopback {
        fn drop(&mut self) {
            self.over.store(true, Ordering::Relaxed);
            self.thread.take().unwrap().join().unwrap();
            std::fs::remove_file(&self.path).unwrap();
        }
    }

    fn with_watch<T>(job: impl FnOnce(&mut Watch<'_>) -> T) -> T {
        job(&mut Watch { deadline: Instant::now() + Duration::from_secs(60), check: &mut || Ok(()) })
    }

    fn shell(text: &str) -> Exec {
        Exec { argv: vec!["sh".into(), "-c".into(), text.into()], ..Exec::default() }
    }

    fn run(session: &mut Session, exec: &Exec, watch: &mut Watch<'_>) -> (Exit, String, String) {
        session.queue_exec(exec, watch).unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let exit = session
            .await_exit(
                &mut |stream, bytes| {
                    if stream == Stream::Out { &mut out } else { &mut err }.extend_from_slice(bytes);
                    Ok(())
                },
                watch,
            )
            .unwrap();
        (exit, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    #[test]
    fn commands_give_their_output_and_their_code() {
        let machine = Loopback::new("exec");
        with_watch(|watch| {
            let mut session = Session::prepare(&machine.path, watch).unwrap();
            session.start();
            for quiet in [false, true] {
                let exec = Exec { quiet, ..shell("echo to out; echo to err >&2; exit 7") };
                let (exit, out, err) = run(&mut session, &exec, watch);
                assert_eq!((exit.code, exit.timed_out), (7, false));
                assert_eq!((out.as_str(), err.as_str()), ("to out\n", "to err\n"));
            }
            let (exit, _, _) = run(&mut session, &shell("kill -9 $$"), watch);
            assert_eq!(exit.code, 137);
            let big = shell("head -c 20000000 /dev/zero | tr '\\0' x");
            assert_eq!(run(&mut session, &big, watch).1.len(), 20_000_000);
            session.close(watch).unwrap();
        });
    }

    #[test]
    fn limits_end_a_command_and_a_missing_program_is_named() {
        let machine = Loopback::new("limit");
        with_watch(|watch| {
            let mut session = Session::prepare(&machine.path, watch).unwrap();
            session.start();
            for quiet in [false, true] {
                let exec = Exec { quiet, limit_ns: 50_000_000, ..shell("sleep 1000 & wait") };
                let (exit, _, _) = run(&mut session, &exec, watch);
                assert_eq!((exit.code, exit.timed_out), (137, true));
            }
            session.queue_exec(&Exec { argv: vec!["no-such-program".into()], ..Exec::default() }, watch).unwrap();
            let error = session.await_exit(&mut |_, _| Ok(()), watch).unwrap_err();
            assert!(error.to_string().contains("no-such-program"), "{error}");
            assert_eq!(run(&mut session, &shell("echo still here"), watch).1, "still here\n");
        });
    }

    #[test]
    fn files_travel_both_ways_with_their_holes_and_before_the_start() {
        let machine = Loopback::new("files");
        let here = std::env::temp_dir().join(format!("tare-lab-files-{}", std::process::id()));
        std::fs::create_dir_all(&here).unwrap();
        let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i % 253) as u8).collect();
        let (source, there, back) = (here.join("source"), here.join("there/deep"), here.join("back"));
        let file = File::create(&source).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 40 << 20).unwrap();
        file.set_len(64 << 20).unwrap();
        with_watch(|watch| {
            let mut session = Session::prepare(&machine.path, watch).unwrap();
            session.queue_put(&source, there.to_str().unwrap(), 0o750, watch).unwrap();
            session.start();
            session.await_put(watch).unwrap();
            let made = there.metadata().unwrap();
            assert_eq!(std::os::unix::fs::MetadataExt::mode(&made) & 0o777, 0o750);
            assert!(std::os::unix::fs::MetadataExt::blocks(&made) * 512 < 16 << 20, "holes were filled");
            session.get(there.to_str().unwrap(), &back, watch).unwrap();
            assert_eq!(std::fs::read(&source).unwrap(), std::fs::read(&back).unwrap());
            session.queue_put(&source, "/proc/nope/x", 0o644, watch).unwrap();
            assert!(session.await_put(watch).unwrap_err().to_string().contains("/proc/nope"));
            assert!(session.get("/no/such/file", &back, watch).unwrap_err().to_string().contains("/no/such/file"));
        });
        std::fs::remove_dir_all(here).unwrap();
    }

    #[test]
    fn a_machine_that_never_answers_is_given_up() {
        let path = std::env::temp_dir().join(format!("tare-lab-dead-{}", std::process::id()));
        File::create(&path).unwrap().set_len(mailbox::SIZE as u64).unwrap();
        let mut late = Watch { deadline: Instant::now() + Duration::from_millis(30), check: &mut || Ok(()) };
        let session = Session::prepare(&path, &mut late).unwrap();
        session.start();
        assert!(session.await_served(&mut late).unwrap_err().to_string().contains("did not answer"));
        let mut gone = Watch { deadline: Instant::now() + Duration::from_secs(60), check: &mut || bail!("it died") };
        assert_eq!(session.await_served(&mut gone).unwrap_err().to_string(), "it died");
        std::fs::remove_file(path).unwrap();
    }
}
