// SPDX-License-Identifier: Apache-2.0
//! Transactions over TCP as netperf defines them: a request of one byte, a response of one byte. `TCP_RR` does all of them on
//! one connection, `TCP_CRR` makes a connection for each. Both ends are here: the server runs beside the monitor, the client in
//! the guest, of suite `net`.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

/// Which of the two tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All transactions on one connection.
    Request,
    /// A connection for each.
    ConnectRequest,
}

impl Kind {
    /// By netperf's name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        match name {
            "TCP_RR" => Some(Self::Request),
            "TCP_CRR" => Some(Self::ConnectRequest),
            _ => None,
        }
    }
}

/// Serves both tests on `address` until the process is killed: `TCP_RR` on its port, `TCP_CRR` on the next one.
///
/// # Errors
/// When it can't listen.
pub fn serve(host: &str, port: u16) -> io::Result<()> {
    let (rr, crr) = (TcpListener::bind((host, port))?, TcpListener::bind((host, port.saturating_add(1)))?);
    let other = thread::Builder::new().name("crr".to_owned()).spawn(move || accept(&crr, Kind::ConnectRequest))?;
    accept(&rr, Kind::Request);
    drop(other);
    Ok(())
}

/// One client after the other: a test has only one.
fn accept(listener: &TcpListener, kind: Kind) {
    for stream in listener.incoming() {
        // A client that breaks off ends its connection, not the server.
        let _ = stream.and_then(|stream| answer(stream, kind));
    }
}

fn answer(mut stream: TcpStream, kind: Kind) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        stream.write_all(&byte)?;
        if kind == Kind::ConnectRequest {
            break;
        }
    }
    Ok(())
}

/// Does `count` transactions with a server at `host` and `port` (that of `TCP_RR`, whichever the test); gives the seconds it
/// took.
///
/// # Errors
/// When the server is not there, goes away or answers something else.
pub fn transact(kind: Kind, host: &str, port: u16, count: u32) -> io::Result<f64> {
    let start = Instant::now();
    match kind {
        Kind::Request => {
            let mut stream = TcpStream::connect((host, port))?;
            stream.set_nodelay(true)?;
            for number in 0..count {
                exchange(&mut stream, number as u8)?;
            }
        }
        Kind::ConnectRequest => {
            for number in 0..count {
                let mut stream = TcpStream::connect((host, port.saturating_add(1)))?;
                exchange(&mut stream, number as u8)?;
                // The server closes first, as netperf's does.
                if stream.read(&mut [0])? != 0 {
                    return Err(io::Error::other("the server said more than it was asked"));
                }
            }
        }
    }
    Ok(start.elapsed().as_secs_f64())
}

fn exchange(stream: &mut TcpStream, request: u8) -> io::Result<()> {
    let mut byte = [request];
    stream.write_all(&byte)?;
    stream.read_exact(&mut byte)?;
    if byte[0] == request { Ok(()) } else { Err(io::Error::other("the server answered something else")) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Two ports next to each other that nobody has.
    fn ports() -> (TcpListener, TcpListener, u16) {
        loop {
            let first = TcpListener::bind(("127.0.0.1", 0)).unwrap();
            let port = first.local_addr().unwrap().port();
            if let Some(next) = port.checked_add(1)
                && let Ok(second) = TcpListener::bind(("127.0.0.1", next))
            {
                return (first, second, port);
            }
        }
    }

    #[test]
    fn both_tests_do_what_they_say() {
        let (rr, crr, port) = ports();
        thread::spawn(move || accept(&rr, Kind::Request));
        let connections = thread::spawn(move || {
            (0..50).map(|_| answer(crr.accept().unwrap().0, Kind::ConnectRequest).is_ok()).filter(|good| *good).count()
        });
        assert!(transact(Kind::Request, "127.0.0.1", port, 500).unwrap() > 0.0);
        assert!(transact(Kind::ConnectRequest, "127.0.0.1", port, 50).unwrap() > 0.0);
        assert_eq!(connections.join().unwrap(), 50, "a connection for each");
    }

    #[test]
    fn a_server_that_lies_or_goes_is_an_error() {
        let (rr, _crr, port) = ports();
        let lies = thread::spawn(move || {
            let (mut stream, _) = rr.accept().unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(&[99]).unwrap();
            drop(rr.accept());
        });
        assert!(transact(Kind::Request, "127.0.0.1", port, 1).unwrap_err().to_string().contains("something else"));
        assert!(transact(Kind::Request, "127.0.0.1", port, 1).is_err());
        lies.join().unwrap();
        assert_eq!(Kind::by_name("TCP_STREAM"), None);
        assert_eq!(Kind::by_name("TCP_CRR"), Some(Kind::ConnectRequest));
    }
}
