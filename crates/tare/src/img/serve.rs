// SPDX-License-Identifier: Apache-2.0
//! `tare img serve`: gives an image to other programs (QEMU, the kernel's NBD client, other monitors) over a Unix socket,
//! until a signal ends it: by NBD, or by vhost-user to another monitor's guest.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::news::News;
use block::Cache;
use export::nbd::{Export, Server};
use export::vhost_user;

use super::args::{Options, Refusal, Word};
use super::image::How;
use super::interrupt;

pub const HELP: &str = "\
usage: tare img serve --nbd SOCKET | --vhost-user SOCKET [-f FORMAT] [-i AIO] [-r] [-t CACHE]
                      [--name=NAME] [--shared=N] [--serial=TEXT] [--backing=GATE] [--key=FILE]
                      [--cow=MODE] [--l2-cache=SIZE] [--zeros=WAY] FILE

Serves an image on a Unix socket until SIGINT or SIGTERM. Over NBD: newstyle handshake,
structured replies, block status (base:allocation), several connections. Over vhost-user
(vhost-user-blk): the virtio block device of tare's own guests, for another monitor's
guest, one at a time. Whoever may write to the socket may use the disk.

  --nbd SOCKET, --vhost-user SOCKET
                  where to listen, and for whom
  -f FORMAT       raw or qcow2; without it the file's first bytes tell
  -i AIO          auto, io_uring or threads [auto]
  -r              read-only
  -t CACHE        writeback, none or unsafe [writeback]
  --name=NAME     what clients call the disk; the empty name works too [the file's name]
  --shared=N      NBD connections at one time, 1 to 256 [16]
  --serial=TEXT   what a vhost-user guest reads as serial number, at most 20 bytes
  --cow=MODE      how qcow2 allocates: explicit, unallocated or zero-aware [zero-aware]
  --l2-cache=SIZE for qcow2's tables [what the disk needs, at most 32M]
  --zeros=WAY     how it zeroes around data: write, fallocate, or auto, which measures [auto]

exit codes: 0 ended by a signal, everything durable; 1 the image or the socket can't be used
";

/// What was asked for.
#[derive(Debug, Default)]
struct Asked {
    how: How,
    file: PathBuf,
    socket: PathBuf,
    vhost_user: bool,
    name: Option<String>,
    serial: Option<String>,
    shared: usize,
}

fn parse(options: &mut Options<'_>) -> Result<Asked, Refusal> {
    let mut asked = Asked { shared: 16, ..Asked::default() };
    let mut files = Vec::new();
    let mut sockets = Vec::new();
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f') => asked.how.take_format(options)?,
            Word::Short('i') => asked.how.take_aio(options)?,
            Word::Short('t') => asked.how.take_cache(options)?,
            Word::Short('r') => asked.how.readonly = true,
            Word::Long(name) => match name.as_str() {
                "backing" => asked.how.take_gate(options)?,
                "key" => asked.how.take_key(options)?,
                "cow" => asked.how.take_cow(options)?,
                "zeros" => asked.how.take_zeros(options)?,
                "l2-cache" => asked.how.l2_cache = Some(options.size()?),
                "nbd" | "vhost-user" => sockets.push((name == "vhost-user", PathBuf::from(options.value()?))),
                "serial" => asked.serial = Some(options.text()?),
                "name" => asked.name = Some(options.text()?),
                "shared" => asked.shared = options.number(1..=256)? as usize,
                "read-only" => asked.how.readonly = true,
                _ => return Err(options.unknown()),
            },
            Word::Short(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    asked.file = options.one_file(files)?;
    (asked.vhost_user, asked.socket) = match sockets.len() {
        0 => return Err(Refusal::new("no socket named: command line; say where to listen with --nbd SOCKET")),
        1 => sockets.remove(0),
        _ => return Err(Refusal::new("more than one socket named: command line; a server listens on one")),
    };
    if asked.serial.as_ref().is_some_and(|serial| serial.len() > 20) {
        return Err(Refusal::new("the serial number is longer than 20 bytes: --serial; choose a shorter one"));
    }
    if asked.name.as_ref().is_some_and(|name| name.len() > 255) {
        return Err(Refusal::new("the name is longer than 255 bytes: --name; choose a shorter one"));
    }
    Ok(asked)
}

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let asked = parse(options)?;
    let mut disk = asked.how.open(&asked.file)?;
    let none_left = |e: io::Error| Refusal::new(format!("no eventfd to be had, {e}: this host"));
    let stop = interrupt::install().map_err(none_left)?;
    let news = Arc::new(News::new().map_err(none_left)?);
    disk.report_to(&news);
    if asked.vhost_user {
        let mut spec = spec::Disk::new(&asked.file);
        spec.serial = asked.serial;
        if asked.how.cache == Cache::Unsafe {
            spec.cache = spec::Cache::Unsafe;
        }
        vhost_user::Server::bind(&asked.socket, disk, &spec).and_then(|server| server.run(&stop, &news))
    } else {
        let name = asked.name.unwrap_or_else(|| file_name(&asked.file));
        let export = Export { name, description: String::new(), disk, clients: asked.shared };
        Server::bind(&asked.socket, export).and_then(|server| server.run(&stop, &news))
    }
    .map_err(Refusal::new)?;
    Ok(0)
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    name.filter(|name| name.len() <= 255).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_asked_for() {
        let asked = |args: &[&str]| {
            let mut parser = lexopt::Parser::from_args(args);
            parse(&mut Options::new(&mut parser, "serve")).map_err(|r| r.message)
        };
        let good = asked(&["-r", "--nbd", "s", "--shared=3", "d.raw"]).unwrap();
        assert_eq!((good.socket, good.shared, good.how.readonly), (PathBuf::from("s"), 3, true));
        assert!(asked(&["d.raw"]).unwrap_err().contains("--nbd SOCKET"));
        assert!(asked(&["--nbd", "s"]).unwrap_err().contains("no image named"));
        assert!(asked(&["--nbd", "s", "--shared=0", "d"]).unwrap_err().contains("1 to 256"));
        assert_eq!(file_name(Path::new("/a/b.raw")), "b.raw");
    }
}
