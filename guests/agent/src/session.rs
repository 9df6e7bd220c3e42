// SPDX-License-Identifier: Apache-2.0
//! The agent's half of one session: reads requests from a channel, runs commands, takes and gives files.
//!
//! One thread per session, plus two per running command that carry its output. A session ends when the lab wants another
//! number on its channel; what it runs is killed then. While a *quiet* command runs the whole agent sleeps: nothing of
//! it costs the run a single instruction, except one timer for the command's limit.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::mailbox::{Channel, RING};
use crate::wire::{Decoder, Ended, Exec, Frame, Kind, MAX_PAYLOAD, WireError, exit_code, head};

/// Held for writing while a quiet command runs; the agent's poller takes it for reading before each look.
pub static STILL: RwLock<()> = RwLock::new(());

const NAP: Duration = Duration::from_millis(2);
const PIECE: usize = 256 << 10;
/// Where the output of quiet commands is kept until they end.
const OUTPUT: &str = "/run";

/// Why a session ends.
#[derive(Debug, Error)]
pub enum Gone {
    /// The lab wants another session on this channel.
    #[error("the lab closed the session")]
    Closed,
    /// The lab sent something that is not the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// A session's end of its channel.
struct Line<'a> {
    channel: Channel<'a>,
    number: u64,
    sending: Mutex<()>,
}

impl Line<'_> {
    fn check(&self) -> Result<(), Gone> {
        if self.channel.wanted() == self.number { Ok(()) } else { Err(Gone::Closed) }
    }

    fn send(&self, kind: Kind, arg: u64, payload: &[u8]) -> Result<(), Gone> {
        let _one_at_a_time = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let up = self.channel.up();
        for mut bytes in [&head(kind, arg, payload.len())[..], payload] {
            while !bytes.is_empty() {
                self.check()?;
                match up.write(bytes) {
                    0 => thread::sleep(NAP),
                    count => bytes = &bytes[count..],
                }
            }
        }
        Ok(())
    }

    fn try_receive(&self, decoder: &mut Decoder) -> Result<Option<Frame>, Gone> {
        self.check()?;
        if let Some(frame) = decoder.next_frame()? {
            return Ok(Some(frame));
        }
        let mut piece = vec![0; RING];
        let count = self.channel.down().read(&mut piece);
        decoder.feed(&piece[..count]);
        Ok(decoder.next_frame()?)
    }

    fn receive(&self, decoder: &mut Decoder) -> Result<Frame, Gone> {
        loop {
            if let Some(frame) = self.try_receive(decoder)? {
                return Ok(frame);
            }
            while self.channel.down().is_empty() {
                self.check()?;
                thread::sleep(NAP);
            }
        }
    }
}

/// Serves session `number` of `channel` until the lab wants another.
///
/// # Errors
/// [`Gone`], always: a session only ends by being given up.
pub fn serve(channel: Channel<'_>, number: u64) -> Result<(), Gone> {
    let line = Line { channel, number, sending: Mutex::new(()) };
    let mut decoder = Decoder::default();
    loop {
        let request = line.receive(&mut decoder)?;
        let done = match request.kind {
            Kind::Exec => {
                let exec = Exec::decode(&request.payload)?;
                if exec.quiet { run_quiet(&line, &exec)? } else { run(&line, &exec, &mut decoder)? }
            }
            Kind::Put => put(&line, &request, &mut decoder)?,
            Kind::Get => get(&line, &request)?,
            _ => Ok(()),
        };
        if let Err(error) = done {
            line.send(Kind::Error, 0, error.to_string().as_bytes())?;
        }
    }
}

fn command(exec: &Exec) -> io::Result<Command> {
    let (program, arguments) =
        exec.argv.split_first().ok_or_else(|| io::Error::other("no command given: nothing to run"))?;
    let mut command = Command::new(program);
    command.args(arguments).process_group(0).stdin(Stdio::null());
    command.current_dir(if exec.cwd.is_empty() { "/" } else { &exec.cwd });
    command.envs(exec.env.iter().map(|(name, value)| (name, value)));
    Ok(command)
}

fn spawn(command: &mut Command) -> io::Result<Child> {
    command.spawn().map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", command.get_program().to_string_lossy())))
}

fn kill_group(child: &Child, signal: i32) {
    let Ok(pid) = i32::try_from(child.id()) else { return };
    // SAFETY: plain system call; the child was made its group's leader and is not reaped yet, so the id is its own.
    unsafe { libc::kill(-pid, signal) };
}

/// Runs a command with its output carried as it comes. The outer error ends the session, the inner one the request.
fn run(line: &Line<'_>, exec: &Exec, decoder: &mut Decoder) -> Result<io::Result<()>, Gone> {
    let begin = Instant::now();
    let started = command(exec)
        .and_then(|mut command| spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped())));
    let mut child = match started {
        Ok(child) => child,
        Err(error) => return Ok(Err(error)),
    };
    let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let over = AtomicBool::new(false);
    let (status, timed_out) = thread::scope(|scope| {
        scope.spawn(|| output.map(|stream| carry(line, Kind::Stdout, stream, &over)));
        scope.spawn(|| errors.map(|stream| carry(line, Kind::Stderr, stream, &over)));
        let outcome = attend(line, exec, &mut child, input, decoder, begin);
        if outcome.is_err() {
            kill_group(&child, libc::SIGKILL);
            let _ = child.wait();
        }
        over.store(true, Ordering::Release);
        outcome
    })?;
    let status = match status {
        Ok(status) => status,
        Err(error) => return Ok(Err(error)),
    };
    let ended = Ended { clock_ns: nanos(begin), timed_out };
    line.send(Kind::Exit, exit_code(status), &ended.encode())?;
    Ok(Ok(()))
}

fn attend(
    line: &Line<'_>,
    exec: &Exec,
    child: &mut Child,
    mut input: Option<ChildStdin>,
    decoder: &mut Decoder,
    begin: Instant,
) -> Result<(io::Result<ExitStatus>, bool), Gone> {
    let mut timed_out = false;
    loop {
        match child.try_wait() {
            Ok(None) => {}
            Ok(Some(status)) => return Ok((Ok(status), timed_out)),
            Err(error) => return Ok((Err(error), timed_out)),
        }
        if exec.limit_ns != 0 && !timed_out && nanos(begin) > exec.limit_ns {
            timed_out = true;
            kill_group(child, libc::SIGKILL);
        }
        match line.try_receive(decoder)? {
            Some(frame) if frame.kind == Kind::Kill => kill_group(child, i32::try_from(frame.arg).unwrap_or(9)),
            Some(frame) if frame.kind == Kind::Stdin => {
                let alive = !frame.payload.is_empty()
                    && input.as_mut().is_some_and(|stream| stream.write_all(&frame.payload).is_ok());
                if !alive {
                    input = None;
                }
            }
            Some(_) => {}
            None => thread::sleep(NAP),
        }
    }
}

/// Carries what a stream gives until it ends, or until the command is over and nothing more is waiting in it.
fn carry(line: &Line<'_>, kind: Kind, mut stream: impl Read + AsRawFd, over: &AtomicBool) -> Result<(), Gone> {
    let mut piece = vec![0; 64 << 10];
    loop {
        let was_over = over.load(Ordering::Acquire);
        if !readable(&stream, 20) {
            if was_over {
                return Ok(());
            }
            continue;
        }
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return Ok(()),
            Ok(count) => line.send(kind, 0, &piece[..count])?,
        }
    }
}

fn readable(fd: &impl AsRawFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd on the stack, and its descriptor is borrowed for the call.
    unsafe { libc::poll(&raw mut poll, 1, timeout_ms) > 0 }
}

/// Runs a command while the agent keeps still.
fn run_quiet(line: &Line<'_>, exec: &Exec) -> Result<io::Result<()>, Gone> {
    let outputs = [(Kind::Stdout, "out"), (Kind::Stderr, "err")];
    let path = |name: &str| format!("{OUTPUT}/tare-quiet-{}.{name}", line.number);
    let ended = (|| {
        let mut command = command(exec)?;
        command.stdout(File::create(path("out"))?).stderr(File::create(path("err"))?);
        let _still = STILL.write().unwrap_or_else(PoisonError::into_inner);
        let begin = Instant::now();
        let mut child = spawn(&mut command)?;
        let timed_out = exec.limit_ns != 0 && !ends_within(&child, exec.limit_ns)?;
        if timed_out {
            kill_group(&child, libc::SIGKILL);
        }
        let status = child.wait()?;
        Ok((status, Ended { clock_ns: nanos(begin), timed_out }))
    })();
    for (kind, name) in outputs {
        if let Ok(bytes) = fs::read(path(name)) {
            for piece in bytes.chunks(MAX_PAYLOAD) {
                line.send(kind, 0, piece)?;
            }
        }
        let _ = fs::remove_file(path(name));
    }
    match ended {
        Ok((status, ended)) => line.send(Kind::Exit, exit_code(status), &ended.encode()).map(Ok),
        Err(error) => Ok(Err(error)),
    }
}

fn ends_within(child: &Child, limit_ns: u64) -> io::Result<bool> {
    let fd = pidfd(child.id())?;
    let limit_ms = i32::try_from(limit_ns.div_ceil(1_000_000)).unwrap_or(i32::MAX);
    Ok(readable(&fd, limit_ms))
}

/// A descriptor that can be read when the process has ended.
///
/// # Errors
/// There is no such process.
pub(crate) fn pidfd(process: u32) -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the descriptor was just made for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn named(path: &str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{path}: {error}"))
}

fn put(line: &Line<'_>, request: &Frame, decoder: &mut Decoder) -> Result<io::Result<()>, Gone> {
    let path = String::from_utf8_lossy(&request.payload).into_owned();
    let mode = u32::try_from(request.arg & 0o7777).unwrap_or(0o644);
    let mut file = create(&path, mode).map_err(named(&path));
    loop {
        let frame = line.receive(decoder)?;
        match frame.kind {
            Kind::Data => {
                if let Ok(open) = &file
                    && let Err(error) = open.write_all_at(&frame.payload, frame.arg)
                {
                    file = Err(named(&path)(error));
                }
            }
            Kind::End => {
                let done = file.and_then(|open| {
                    open.set_len(frame.arg)?;
                    open.set_permissions(fs::Permissions::from_mode(mode))
                });
                return match done {
                    Ok(()) => line.send(Kind::End, frame.arg, &[]).map(Ok),
                    Err(error) => Ok(Err(error)),
                };
            }
            _ => {}
        }
    }
}

fn create(path: &str, mode: u32) -> io::Result<File> {
    if let Some(parent) = Path::new(path).parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(mode).open(path)
}

fn get(line: &Line<'_>, request: &Frame) -> Result<io::Result<()>, Gone> {
    let path = String::from_utf8_lossy(&request.payload).into_owned();
    let mut file = match File::open(&path).map_err(named(&path)) {
        Ok(file) => file,
        Err(error) => return Ok(Err(error)),
    };
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    loop {
        match file.read(&mut piece) {
            Ok(0) => return line.send(Kind::End, at, &[]).map(Ok),
            Ok(count) => {
                if piece[..count].iter().any(|byte| *byte != 0) {
                    line.send(Kind::Data, at, &piece[..count])?;
                }
                at += count as u64;
            }
            Err(error) => return Ok(Err(named(&path)(error))),
        }
    }
}
