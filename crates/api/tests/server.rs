// SPDX-License-Identifier: Apache-2.0
//! The server and its client over a real socket: commands and replies, and clients that mean no good.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use api::{ClientError, Server, Serving, call};
use spec::{Command, DiskInfo, Info, Reply, ResizeDisk};

fn info() -> Info {
    let disk = DiskInfo { id: "disk0".into(), path: "/a \"b\"".into(), size: u64::MAX, queues: 4, readonly: true };
    Info {
        version: "1".into(),
        state: "Running".into(),
        cpus: 2,
        memory: 1 << 30,
        memory_actual: 1 << 30,
        memory_most: 2 << 30,
        disks: vec![disk],
        vfio: vec![spec::PciAddress { bus: 1, ..spec::PciAddress::default() }],
    }
}

fn serve(server: &Server) -> Serving {
    let answer = |command| match command {
        Command::Info => Reply::Info(info()),
        Command::ResizeDisk(ResizeDisk { id, desired_size: 4096 }) if id == "disk0" => Reply::Done,
        Command::ResizeMemory(resize) if resize.desired_size == 1 << 30 => Reply::Done,
        Command::ResizeMemory(resize) => Reply::Refused(format!("no {} bytes", resize.desired_size)),
        Command::ResizeDisk(resize) => Reply::Refused(format!("no {} of {}\nbytes", resize.id, resize.desired_size)),
        Command::AddDevice(device) => Reply::Refused(format!("no {}", device.host)),
        Command::RemoveDevice(device) => Reply::Refused(format!("no {} in {} s", device.host, device.timeout)),
    };
    server.serve(Box::new(answer)).unwrap()
}

/// Sends `bytes`, perhaps ends there, and gives all that comes back.
fn talk(path: &Path, bytes: &[u8], end: bool) -> String {
    let mut socket = UnixStream::connect(path).unwrap();
    // A server that has refused reads no more.
    let _ = socket.write_all(bytes);
    if end {
        socket.shutdown(std::net::Shutdown::Write).unwrap();
    }
    let mut back = Vec::new();
    let _ = socket.read_to_end(&mut back);
    String::from_utf8(back).unwrap()
}

#[test]
fn commands_and_replies() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let server = Server::bind(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    let resize = |id: &str, desired_size| Command::ResizeDisk(ResizeDisk { id: id.into(), desired_size });
    for _ in 0..3 {
        let _serving = serve(&server);
        assert_eq!(call(&path, &Command::Info).unwrap(), Reply::Info(info()));
        assert_eq!(call(&path, &resize("disk0", 4096)).unwrap(), Reply::Done);
        let refused = call(&path, &resize("disk1", 7)).unwrap();
        assert_eq!(refused, Reply::Refused("no disk1 of 7 bytes".into()), "one line");
        let host = spec::PciAddress { bus: 3, ..spec::PciAddress::default() };
        let device = spec::RemoveDevice { host, timeout: 4, force: false };
        let refused = call(&path, &Command::RemoveDevice(device)).unwrap();
        assert_eq!(refused, Reply::Refused("no 0000:03:00.0 in 4 s".into()));
    }
    assert!(matches!(Server::bind(&path), Err(base::listen::Error::Taken(_))));
    drop(server);
    assert!(!path.exists());
    let Err(gone) = call(&path, &Command::Info) else { panic!("nobody listens") };
    assert!(matches!(gone, ClientError::Unreachable { .. }), "{gone}");
    assert!(!gone.to_string().contains('\n'));
}

#[test]
fn others_see_plain_http() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let server = Server::bind(&path).unwrap();
    let _serving = serve(&server);
    let back = talk(&path, b"GET /api/v1/vm.info HTTP/1.1\r\nHost: x\r\n\r\n", false);
    assert!(back.starts_with("HTTP/1.1 200 OK\r\n") && back.contains("\"id\":\"disk0\""), "{back}");
    let body = r#"{"id":"disk0","desired_size":4096}"#;
    let put = format!("PUT /api/v1/vm.resize-disk HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    assert!(talk(&path, put.as_bytes(), false).starts_with("HTTP/1.1 204 No Content\r\n"));
    let back = talk(&path, b"GET /nothing HTTP/1.1\r\n\r\n", false);
    assert!(back.starts_with("HTTP/1.1 404 ") && back.contains("{\"fault_message\":\"there are /api/v1/"), "{back}");
}

#[test]
fn a_bad_client_harms_nobody_but_itself() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let server = Server::bind(&path).unwrap();
    let serving = serve(&server);
    let code = |bytes: &[u8]| talk(&path, bytes, false).get(9..12).unwrap_or_default().to_owned();
    assert_eq!(code(b"\x00\x01\x02\r\n\r\n"), "400");
    assert_eq!(code(&vec![b'A'; 9 << 10]), "431");
    assert_eq!(code(b"PUT /api/v1/vm.resize-disk HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n"), "413");
    assert_eq!(code(b"PUT /api/v1/vm.resize-disk HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"), "400");
    assert_eq!(code(b"GET /api/v1/vm.info HTTP/1.1\r\n"), "408", "half a request waits no longer than it may");
    assert_eq!(talk(&path, b"GET /api/v1/vm.info HTTP/1.1\r\n", true), "", "nor for one who has left");
    drop(UnixStream::connect(&path).unwrap());
    // What the next one asks is answered all the same.
    assert_eq!(call(&path, &Command::Info).unwrap(), Reply::Info(info()));
    // Clients that say nothing don't keep the server from ending; those behind them are there for the next.
    let silent: Vec<UnixStream> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
    drop(serving);
    let _serving = serve(&server);
    drop(silent);
    assert_eq!(call(&path, &Command::Info).unwrap(), Reply::Info(info()));
}
