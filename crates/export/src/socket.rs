// SPDX-License-Identifier: Apache-2.0
//! Vectored transfers on a stream socket: several replies in one call, a payload and the next header in one call, waiting
//! or not by the call. std's own streams choose waiting by the socket, and raise a signal nobody wants.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// What a receive came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing there now.
    Nothing,
    /// The peer is done.
    Closed,
}

/// Receives into `parts`, in order, until the socket has no more or they are full. With `wait` at least one byte, unless
/// the peer ends.
///
/// # Errors
/// What `recvmsg` says; a signal is no error.
pub fn receive(socket: &UnixStream, parts: &mut [IoSliceMut<'_>], wait: bool) -> io::Result<Got> {
    let flags = if wait { 0 } else { libc::MSG_DONTWAIT };
    let mut message = message(parts.as_mut_ptr().cast(), parts.len());
    // SAFETY: IoSliceMut has the layout of iovec (std promises it); the parts are live and exclusively borrowed for the
    // call, which writes inside their lengths only.
    let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags) };
    match usize::try_from(n) {
        Ok(0) => Ok(Got::Closed),
        Ok(n) => Ok(Got::Bytes(n)),
        Err(_) => match io::Error::last_os_error() {
            e if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(Got::Nothing),
            e => Err(e),
        },
    }
}

/// Sends all bytes of `parts`, waiting as long as it takes; they are advanced.
///
/// # Errors
/// What `sendmsg` says; `EPIPE` when the peer is gone.
pub fn send_all(socket: &UnixStream, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
    IoSlice::advance_slices(&mut parts, 0);
    while !parts.is_empty() {
        let count = parts.len().min(MAX_PARTS);
        let message = message(parts.as_ptr().cast_mut().cast(), count);
        // SAFETY: IoSlice has the layout of iovec (std promises it); the parts are live for the call, which only reads them.
        let n = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        match usize::try_from(n) {
            Ok(n) => IoSlice::advance_slices(&mut parts, n),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// `IOV_MAX`.
const MAX_PARTS: usize = 1024;

fn message(parts: *mut libc::iovec, count: usize) -> libc::msghdr {
    // SAFETY: msghdr is plain data, for which zero bytes are valid (no address, no control data).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts;
    message.msg_iovlen = count;
    message
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_in_order_across_parts() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut x, mut y) = ([0; 3], [0; 5]);
        let mut parts = [IoSliceMut::new(&mut x), IoSliceMut::new(&mut y)];
        assert_eq!(receive(&b, &mut parts, false).unwrap(), Got::Nothing);
        send_all(&a, &mut [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cdef")]).unwrap();
        assert_eq!(receive(&b, &mut parts, true).unwrap(), Got::Bytes(6));
        assert_eq!((&x, &y), (b"abc", b"def\0\0"));
        drop(a);
        assert_eq!(receive(&b, &mut [IoSliceMut::new(&mut x)], true).unwrap(), Got::Closed);
        assert_eq!(send_all(&b, &mut [IoSlice::new(b"x")]).unwrap_err().raw_os_error(), Some(libc::EPIPE));
    }

    #[test]
    fn more_than_the_socket_holds_is_sent_all() {
        let (a, b) = UnixStream::pair().unwrap();
        let data: Vec<u8> = (0..3_000_000u32).map(|i| i as u8).collect();
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            std::io::Read::read_to_end(&mut &b, &mut all).unwrap();
            all
        });
        let mut parts: Vec<IoSlice<'_>> = data.chunks(1000).map(IoSlice::new).collect();
        send_all(&a, &mut parts).unwrap();
        drop(a);
        assert_eq!(reader.join().unwrap(), data);
    }
}
