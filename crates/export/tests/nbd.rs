// SPDX-License-Identifier: Apache-2.0
//! The NBD server under QEMU's client (skipped where its tools are missing), and under clients that break every rule.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;

use base::EventFd;
use base::news::News;
use block::{Disk, MemImage, Options};
use export::nbd::{Export, Server};

const SIZE: u64 = 8 << 20;

/// A server in this process, over a raw image in a folder of its own.
struct Served {
    dir: tempfile::TempDir,
    stop: EventFd,
    server: Option<JoinHandle<Result<(), export::Error>>>,
}

impl Served {
    fn over(disk: Disk, dir: tempfile::TempDir) -> Self {
        let export = Export { name: "disk".into(), description: "for tests".into(), disk, clients: 8 };
        let server = Server::bind(&dir.path().join("s"), export).unwrap();
        let stop = EventFd::new(0).unwrap();
        let theirs = stop.try_clone().unwrap();
        Self { dir, stop, server: Some(std::thread::spawn(move || server.run(&theirs, &News::new().unwrap()))) }
    }

    fn raw(readonly: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        let bytes: Vec<u8> = (0..SIZE).map(|i| (i / 512) as u8).collect();
        fs::write(&path, bytes).unwrap();
        let mut options = Options::new(&path);
        options.readonly = readonly;
        let disk = Disk::open(&options).unwrap();
        Self::over(disk, dir)
    }

    fn memory() -> Self {
        let image = MemImage::new(vec![0; SIZE as usize]);
        Self::over(Disk::in_memory(&image, false), tempfile::tempdir().unwrap())
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket().display())
    }

    /// Stops the server and looks at what it left.
    fn end(mut self) -> tempfile::TempDir {
        self.stop.write(1).unwrap();
        self.server.take().unwrap().join().unwrap().unwrap();
        assert!(!self.socket().exists(), "the socket goes with the server");
        let path = self.dir.path().to_owned();
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        assert_eq!(dir.path(), path);
        dir
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
    }
}

fn has(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|o| o.status.success());
    if !found {
        eprintln!("skipped: {tool} is missing");
    }
    found
}

fn qemu_io(uri: &str, commands: &[&str]) -> String {
    let mut command = Command::new("qemu-io");
    for c in commands {
        command.args(["-c", c]);
    }
    let output = command.args(["-f", "raw", "-t", "none", uri]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn qemu_reads_writes_flushes_trims_and_zeroes() {
    if !has("qemu-io") {
        return;
    }
    let served = Served::raw(false);
    let text = qemu_io(
        &served.uri(),
        &[
            "read -P 5 2560 512",
            "write -P 0xaa 4096 65536",
            "write -f -P 0xbb 1000000 3000",
            "write -z 131072 65536",
            "write -z -u 262144 65536",
            "discard 524288 65536",
            "aio_write -P 1 1048576 1048576",
            "aio_write -P 2 2097152 1048576",
            "aio_read 3145728 2097152",
            "aio_flush",
            "flush",
            "read -P 0xaa 4096 65536",
            "read -P 0 131072 65536",
            "read -P 1 1048576 1048576",
            "length",
        ],
    );
    assert!(!text.contains("failed") && text.contains("8 MiB"), "{text}");
    let dir = served.end();
    let bytes = fs::read(dir.path().join("disk.raw")).unwrap();
    assert!(bytes[4096..4096 + 65536].iter().all(|b| *b == 0xaa));
    assert!(bytes[1_000_000..1_003_000].iter().all(|b| *b == 0xbb));
    assert!(bytes[262_144..262_144 + 65536].iter().all(|b| *b == 0));
    assert!(bytes[2 << 20..3 << 20].iter().all(|b| *b == 2));
    assert_eq!(bytes[4 << 20..4 << 20 | 512], [0; 512][..], "8192 sectors in, the pattern is back at 0");
    assert_eq!(bytes[(5 << 20) + 512], 1);
}

#[test]
fn whole_images_go_through() {
    if !has("qemu-img") {
        return;
    }
    let served = Served::raw(true);
    let copy = served.dir.path().join("copy.raw");
    let run = |args: &[&str]| {
        let output = Command::new("qemu-img").args(args).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (uri, to) = (served.uri(), copy.display().to_string());
    assert_eq!(run(&["convert", "-f", "raw", "-O", "raw", &uri, &to]).0, 0);
    let disk = served.dir.path().join("disk.raw");
    assert_eq!(fs::read(&copy).unwrap(), fs::read(&disk).unwrap());
    assert_eq!(run(&["compare", "-f", "raw", "-F", "raw", &uri, &to]).0, 0);
    let (code, json) = run(&["map", "--output=json", "-f", "raw", &uri]);
    assert_eq!(code, 0);
    assert!(json.contains("\"length\": 8388608"), "{json}");
    let refused = Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512", &uri]).output().unwrap();
    assert!(!refused.status.success(), "the export is read-only");
}

/// A client by hand.
struct Client(UnixStream);

impl Client {
    fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        let mut client = Self(stream);
        assert_eq!(client.take(18)[..8], *b"NBDMAGIC");
        client
    }

    /// Past an `EXPORT_NAME` handshake, with or without structured replies.
    fn ready(socket: &Path, structured: bool) -> Self {
        let mut client = Self::connect(socket);
        client.put(&3u32.to_be_bytes());
        if structured {
            client.put(b"IHAVEOPT\0\0\0\x08\0\0\0\0");
            client.take(20);
        }
        client.put(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
        assert_eq!(client.take(10)[..8], SIZE.to_be_bytes());
        client
    }

    fn put(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    fn take(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn ask(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
        self.put(&header(flags, command, cookie, offset, len));
    }

    /// A simple reply's error and cookie.
    fn simple(&mut self) -> (u32, u64) {
        let reply = self.take(16);
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        (u32::from_be_bytes(reply[4..8].try_into().unwrap()), u64::from_be_bytes(reply[8..].try_into().unwrap()))
    }

    fn is_sent_away(&mut self) {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
        }
        assert!(rest.is_empty(), "{rest:?}");
    }
}

fn header(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend([flags, command].map(u16::to_be_bytes).concat());
    bytes.extend([cookie, offset].map(u64::to_be_bytes).concat());
    bytes.extend(len.to_be_bytes());
    bytes
}

const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

#[test]
fn wrong_requests_get_errors_and_the_connection_goes_on() {
    let served = Served::memory();
    let mut client = Client::ready(&served.socket(), false);
    for (flags, command, offset, len, expected) in [
        (0, 0, SIZE, 1, EINVAL),
        (0, 0, u64::MAX, 2, EINVAL),
        (0, 0, 0, (32 << 20) + 1, EINVAL),
        (4, 0, 0, 512, EINVAL),
        (0x8000, 3, 0, 0, EINVAL),
        (0, 3, 1, 1, 0),
        (0, 4, 0, u32::MAX, ENOSPC),
        (0, 4, SIZE, 0, 0),
        (0, 5, 0, 512, EINVAL),
        (16, 6, 0, 512, EINVAL),
        (0, 6, SIZE - 1, 2, ENOSPC),
        (0, 7, 0, 512, EINVAL),
        (0, 77, 0, 512, EINVAL),
    ] {
        client.ask(flags, command, 42, offset, len);
        assert_eq!(client.simple(), (expected, 42), "command {command} at {offset} for {len}");
    }
    client.ask(0, 1, 7, SIZE - 4, 8);
    client.put(&[9; 8]);
    assert_eq!(client.simple(), (ENOSPC, 7), "the payload is taken all the same");
    client.ask(1, 1, 8, 4, 4);
    client.put(b"abcd");
    assert_eq!(client.simple(), (0, 8));
    client.ask(0, 0, 9, 3, 6);
    assert_eq!(client.simple(), (0, 9));
    assert_eq!(client.take(6), b"\0abcd\0");
    client.ask(0, 2, 0, 0, 0);
    client.is_sent_away();
}

#[test]
fn structured_replies() {
    let served = Served::raw(true);
    let mut client = Client::ready(&served.socket(), true);
    client.ask(4, 0, 5, 512, 3);
    let chunk = client.take(20 + 8 + 3);
    assert_eq!(chunk[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1]);
    assert_eq!(chunk[20..], [&512u64.to_be_bytes()[..], &[1, 1, 1]].concat());
    client.ask(0, 0, 6, SIZE, 1);
    let chunk = client.take(20 + 6);
    assert_eq!(chunk[4..8], [0, 1, 0x80, 1]);
    assert_eq!(chunk[20..], [0, 0, 0, EINVAL as u8, 0, 0]);
    client.ask(0, 1, 7, 0, 2);
    client.put(b"xx");
    assert_eq!(client.simple(), (EPERM, 7));
}

#[test]
fn many_requests_in_one_breath() {
    let served = Served::memory();
    let mut client = Client::ready(&served.socket(), false);
    let mut sent = Vec::new();
    for i in 0..600u64 {
        sent.extend(header(0, 1, i, i * 4096, 4096));
        sent.extend(vec![i as u8; 4096]);
    }
    let mut writer = Client(client.0.try_clone().unwrap());
    let thread = std::thread::spawn(move || writer.put(&sent));
    let mut seen: Vec<u64> =
        (0..600).map(|_| client.simple()).map(|(e, cookie)| [cookie, u64::MAX][e.min(1) as usize]).collect();
    thread.join().unwrap();
    seen.sort_unstable();
    assert_eq!(seen, (0..600).collect::<Vec<_>>());
    // Reads and a write in one piece, so that a payload starts in the middle of what was received.
    let mut sent = Vec::new();
    for i in 0..40 {
        sent.extend(header(0, 0, i, i * 4096, 16));
    }
    sent.extend(header(0, 1, 40, 0, 5000));
    sent.extend(vec![7; 5000]);
    sent.extend(header(0, 3, 41, 0, 0));
    client.put(&sent);
    let mut left: Vec<u64> = (0..42).collect();
    while !left.is_empty() {
        let (error, cookie) = client.simple();
        assert_eq!(error, 0);
        left.retain(|c| *c != cookie);
        if cookie < 40 {
            assert!([vec![cookie as u8; 16], vec![7; 16]].contains(&client.take(16)));
        }
    }
}

#[test]
fn clients_that_are_none_harm_nobody() {
    let served = Served::raw(false);
    let socket = served.socket();
    drop(UnixStream::connect(&socket).unwrap());
    let mut rude = Client::connect(&socket);
    rude.put(b"GET / HTTP/1.1\r\n\r\n");
    rude.is_sent_away();
    let mut rude = Client::ready(&socket, false);
    rude.put(&[0xff; 28]);
    rude.is_sent_away();
    let mut rude = Client::ready(&socket, false);
    rude.ask(0, 1, 1, 0, u32::MAX);
    rude.is_sent_away();
    let mut rude = Client::ready(&socket, false);
    rude.ask(0, 1, 1, 0, 1 << 20);
    rude.put(&[0xee; 1000]);
    drop(rude);
    let mut asks_and_leaves = Client::ready(&socket, true);
    for i in 0..100 {
        asks_and_leaves.ask(0, 0, i, 0, 1 << 20);
    }
    drop(asks_and_leaves);
    let mut big = Client::ready(&socket, true);
    big.ask(0, 0, 1, 0, u32::MAX);
    assert_eq!(big.take(26)[20..24], EINVAL.to_be_bytes());
    drop(big);
    let mut random = 1u64;
    for _ in 0..100 {
        let mut client = UnixStream::connect(&socket).unwrap();
        let bytes: Vec<u8> = (0..64)
            .map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 56) as u8
            })
            .collect();
        // It may be sent away before it said all.
        let _ = client.write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT", &bytes].concat());
    }
    let mut honest = Client::ready(&socket, false);
    honest.ask(0, 0, 1, 512, 1);
    assert_eq!(honest.simple(), (0, 1));
    assert_eq!(honest.take(1), [1], "a payload that was cut off changed nothing");
    drop(honest);
    served.end();
}
