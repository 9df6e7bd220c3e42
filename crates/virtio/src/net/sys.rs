// SPDX-License-Identifier: Apache-2.0
//! The system calls of the network device: vectored I/O straight into guest memory, taps, descriptors that the user passed in.
//!
//! Called by the wires, on the worker's thread, or where a device is made. Nothing here waits.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use base::Seg;

/// The most segments that one call takes (`UIO_MAXIOV`).
pub const MAX_SEGS: usize = 1024;

/// Repeats a call that a signal interrupted, and turns its result into Rust's.
fn call(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        if let Ok(done) = usize::try_from(call()) {
            return Ok(done);
        }
        let why = io::Error::last_os_error();
        if why.kind() != io::ErrorKind::Interrupted {
            return Err(why);
        }
    }
}

fn count(segs: &[Seg]) -> libc::c_int {
    segs.len().min(MAX_SEGS) as libc::c_int
}

/// Reads one packet of a tap into `segs`.
pub fn read(fd: &impl AsRawFd, segs: &[Seg]) -> io::Result<usize> {
    // SAFETY: a Seg has the layout of an iovec; each leads to memory that its maker keeps mapped and gives away for writing.
    call(|| unsafe { libc::readv(fd.as_raw_fd(), segs.as_ptr().cast(), count(segs)) })
}

/// Writes one packet to a tap from `segs`.
pub fn write(fd: &impl AsRawFd, segs: &[Seg]) -> io::Result<usize> {
    // SAFETY: as in `read`; the kernel only reads the bytes.
    call(|| unsafe { libc::writev(fd.as_raw_fd(), segs.as_ptr().cast(), count(segs)) })
}

/// A message header over `segs`.
fn message(segs: &[Seg]) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr: no name, no control data, no flags.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = segs.as_ptr().cast_mut().cast();
    message.msg_iovlen = segs.len().min(MAX_SEGS);
    message
}

/// Receives what a stream socket has now into `segs`; 0 at its end.
pub fn receive(fd: &impl AsRawFd, segs: &[Seg]) -> io::Result<usize> {
    let mut message = message(segs);
    // SAFETY: as in `read`; the header is live for the call.
    call(|| unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })
}

/// Sends what a stream socket takes now from `segs`.
pub fn send(fd: &impl AsRawFd, segs: &[Seg]) -> io::Result<usize> {
    let message = message(segs);
    // SAFETY: as in `read`; the header is live for the call and the kernel only reads.
    call(|| unsafe { libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
}

/// Four bytes from the kernel's generator.
pub fn random() -> Option<u32> {
    let mut bytes = [0u8; 4];
    // SAFETY: the buffer is valid for the four bytes asked for.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    (got == 4).then(|| u32::from_ne_bytes(bytes))
}

/// A descriptor of our own for the open file behind number `fd`, which the user passed in and which stays open.
pub fn duplicate(fd: u32) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: no pointers; a number that is not open gives EBADF.
    let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if own < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}

/// A file in memory that a child may write to.
pub fn memory_file() -> io::Result<File> {
    // SAFETY: the name is a literal that ends in a zero byte.
    let fd = unsafe { libc::memfd_create(c"passt".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Whether `fd` is a connected stream socket.
pub fn is_stream(fd: &impl AsRawFd) -> bool {
    let (mut kind, mut len) = (0 as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: value and length are live for the call, and the length says how long the value is.
    let asked =
        unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_TYPE, (&raw mut kind).cast(), &mut len) };
    asked == 0 && kind == libc::SOCK_STREAM
}

/// `struct ifreq` as the tap calls use it.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: u16,
    rest: [u8; 22],
}

/// What a tap is.
const TAP: u16 = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as u16;

/// Opens the tap called `name`, or makes it where the caller may; with `several` one more queue of it.
pub fn open_tap(name: &str, several: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open("/dev/net/tun")?;
    let flags = if several { TAP | libc::IFF_MULTI_QUEUE as u16 } else { TAP };
    let mut request = Request { name: [0; libc::IFNAMSIZ], flags, rest: [0; 22] };
    // The last byte stays 0.
    for (to, from) in request.name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
        *to = from;
    }
    // SAFETY: the call reads and writes one ifreq, which is live.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// Attaches a queue to its tap, or detaches it: then the tap sends nothing to it.
pub fn attach_queue(fd: &impl AsRawFd, attach: bool) -> io::Result<()> {
    let flags = if attach { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE } as u16;
    let mut request = Request { name: [0; libc::IFNAMSIZ], flags, rest: [0; 22] };
    // SAFETY: the call reads one ifreq, which is live.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETQUEUE, &mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The name of a tap's interface.
pub fn tap_name(fd: &impl AsRawFd) -> Option<String> {
    let mut request = Request { name: [0; libc::IFNAMSIZ], flags: 0, rest: [0; 22] };
    // SAFETY: the call writes one ifreq, which is live.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &mut request) } < 0 {
        return None;
    }
    let name = request.name.split(|byte| *byte == 0).next()?;
    std::str::from_utf8(name).ok().map(str::to_owned)
}

/// Whether `fd` is a tap whose packets have a virtio header, and makes its reads return at once. `None`: it is no tap.
pub fn adopt_tap(fd: &OwnedFd) -> Option<bool> {
    let mut request = Request { name: [0; libc::IFNAMSIZ], flags: 0, rest: [0; 22] };
    // SAFETY: the call writes one ifreq, which is live.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &mut request) } < 0 || request.flags & TAP & 3 == 0 {
        return None;
    }
    // It belongs to the open file, which is the guest's alone.
    base::fd::set_nonblocking(fd, true).ok()?;
    Some(request.flags & libc::IFF_VNET_HDR as u16 != 0)
}

/// Sets how long the virtio header of a tap's packets is.
pub fn set_header(fd: &impl AsRawFd, bytes: usize) -> io::Result<()> {
    let bytes = bytes as libc::c_int;
    // SAFETY: the call reads one int, which is live.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ, &bytes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Says what the reader of a tap copes with: `TUN_F_*`.
pub fn set_offloads(fd: &impl AsRawFd, offloads: libc::c_uint) -> io::Result<()> {
    // SAFETY: the argument is a number.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
