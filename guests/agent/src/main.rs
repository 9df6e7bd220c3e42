// SPDX-License-Identifier: Apache-2.0
//! `tare-agent`: runs inside the lab machine, first as its process 1 and then, as a child of that, serving the mailbox. The
//! scripts of samples use its `watch`, there and on hosts where samples run directly. `answer` and `transact` are the two ends
//! of suite `net`'s transactions.
//!
//! The machine's `/init` prepares the system and then becomes this program. Process 1 only reaps; when the serving child
//! ends the machine powers off, so that the lab sees it at once.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use agent::mailbox::{CHANNELS, Mailbox};
use agent::session::{self, STILL};

/// How often the agent looks for new sessions.
const LOOK: Duration = Duration::from_millis(5);

fn main() -> ExitCode {
    let done = match std::env::args().nth(1).as_deref() {
        Some("--fingerprint") => {
            println!("{:016x}", agent::FINGERPRINT);
            return ExitCode::SUCCESS;
        }
        Some("serve") => serve(),
        Some("watch") => watch(),
        Some("answer") => answer(),
        Some("transact") => transact(),
        _ if std::process::id() == 1 => reap(),
        _ => Err(io::Error::other("runs as process 1 of the lab machine, which tare-lab makes; nothing to do here")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tare-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// `watch CONSOLE PERIOD`: see the library's module of that name.
fn watch() -> io::Result<()> {
    let mut words = std::env::args_os().skip(2);
    let console = words.next();
    let period = words.next().and_then(|word| word.to_str().and_then(|word| word.parse().ok()));
    let (Some(console), Some(period)) = (console, period) else {
        return Err(io::Error::other("watch wants a console file and a period in microseconds"));
    };
    let orders = std::io::stdin().as_fd().try_clone_to_owned()?;
    agent::watch::watch(console.as_ref(), Duration::from_micros(period), orders.into(), &mut io::stdout())
}

/// `answer HOST PORT`: the server of suite `net`.
fn answer() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(2).collect();
    match words.as_slice() {
        [host, port] => agent::transact::serve(host, number(port)?),
        _ => Err(io::Error::other("answer wants an address and a port")),
    }
}

/// `transact TEST HOST PORT COUNT`: its client.
fn transact() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(2).collect();
    let [test, host, port, count] = words.as_slice() else {
        return Err(io::Error::other("transact wants TCP_RR or TCP_CRR, an address, a port and a count"));
    };
    let kind = agent::transact::Kind::by_name(test)
        .ok_or_else(|| io::Error::other(format!("there is no test '{test}': use TCP_RR or TCP_CRR")))?;
    let count = number(count)?;
    let seconds = agent::transact::transact(kind, host, number(port)?, count)?;
    println!("transactions: {count}\nseconds: {seconds:.6}");
    Ok(())
}

fn number<T: std::str::FromStr>(text: &str) -> io::Result<T> {
    text.parse().map_err(|_| io::Error::other(format!("'{text}' is not a number that fits")))
}

/// Process 1: starts the server and reaps whatever dies, until the server does.
fn reap() -> io::Result<()> {
    let server = Command::new("/proc/self/exe").arg("serve").spawn()?.id();
    loop {
        let mut status = 0;
        // SAFETY: plain system call with a valid pointer; no `Child` of this process is waited for elsewhere.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        if u32::try_from(pid) == Ok(server) || pid < 0 {
            eprintln!("tare-agent: the server ended (status {status:#x}), powering off");
            // SAFETY: plain system calls without memory arguments.
            unsafe {
                libc::sync();
                libc::reboot(libc::RB_POWER_OFF);
            }
            return Err(io::Error::last_os_error());
        }
    }
}

fn serve() -> io::Result<()> {
    let mailbox: &'static Mailbox = Box::leak(Box::new(mailbox()?));
    let mut sessions: [Option<thread::JoinHandle<()>>; CHANNELS] = [const { None }; CHANNELS];
    loop {
        drop(STILL.read());
        mailbox.announce(clock());
        for (index, slot) in sessions.iter_mut().enumerate() {
            let channel = mailbox.channel(index);
            let wanted = channel.wanted();
            if wanted == channel.served() {
                continue;
            }
            if let Some(old) = slot.take() {
                let _ = old.join();
            }
            channel.serve(wanted);
            if wanted != 0 {
                *slot = Some(thread::Builder::new().name(format!("session-{index}")).spawn(move || {
                    let _ = session::serve(channel, wanted);
                })?);
            }
        }
        thread::sleep(LOOK);
    }
}

/// The mailbox: physical memory that no driver claims, where the kernel's command line says.
fn mailbox() -> io::Result<Mailbox> {
    let line = fs::read_to_string("/proc/cmdline")?;
    let address = line.split_whitespace().find_map(|word| word.strip_prefix("tare.mailbox=0x"));
    let address = address.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let address = address.ok_or_else(|| io::Error::other("the kernel's command line has no tare.mailbox=0x..."))?;
    Mailbox::map(&OpenOptions::new().read(true).write(true).open("/dev/mem")?, address)
}

fn clock() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid pointer to a timespec on the stack.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
