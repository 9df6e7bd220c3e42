// SPDX-License-Identifier: Apache-2.0
//! `tare img serve`: gives an image to other programs (QEMU, the kernel's NBD client, other monitors) over a Unix socket,
//! until a signal ends it.

use std::path::{Path, PathBuf};

use export::nbd::{Export, Server};

use super::args::{Options, Refusal, Word};
use super::image::How;
use super::interrupt;

pub const HELP: &str = "\
usage: tare img serve --nbd SOCKET [-f FORMAT] [-i AIO] [-r] [-t CACHE] [--name=NAME]
                      [--shared=N] [--backing=GATE] FILE

Serves an image over NBD on a Unix socket until SIGINT or SIGTERM: newstyle handshake,
structured replies, block status (base:allocation), several connections. Whoever may
write to the socket may use the disk.

  --nbd SOCKET    where to listen
  -f FORMAT       raw or qcow2; without it the file's first bytes tell
  -i AIO          auto, io_uring or threads [auto]
  -r              read-only
  -t CACHE        writeback, none or unsafe [writeback]
  --name=NAME     what clients call the disk; the empty name works too [the file's name]
  --shared=N      connections at one time, 1 to 256 [16]

exit codes: 0 ended by a signal, everything durable; 1 the image or the socket can't be used
";

/// What was asked for.
#[derive(Debug, Default)]
struct Asked {
    how: How,
    file: PathBuf,
    nbd: PathBuf,
    name: Option<String>,
    shared: usize,
}

fn parse(options: &mut Options<'_>) -> Result<Asked, Refusal> {
    let mut asked = Asked { shared: 16, ..Asked::default() };
    let mut files = Vec::new();
    let mut nbd = None;
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f') => asked.how.take_format(options)?,
            Word::Short('i') => asked.how.take_aio(options)?,
            Word::Short('t') => asked.how.take_cache(options)?,
            Word::Short('r') => asked.how.readonly = true,
            Word::Long(name) => match name.as_str() {
                "backing" => asked.how.take_gate(options)?,
                "nbd" => nbd = Some(PathBuf::from(options.value()?)),
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
    asked.nbd =
        nbd.ok_or_else(|| Refusal::new("no socket named: command line; say where to listen with --nbd SOCKET"))?;
    if asked.name.as_ref().is_some_and(|name| name.len() > 255) {
        return Err(Refusal::new("the name is longer than 255 bytes: --name; choose a shorter one"));
    }
    Ok(asked)
}

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let asked = parse(options)?;
    let disk = asked.how.open(&asked.file)?;
    let stop = interrupt::install().map_err(|e| Refusal::new(format!("no eventfd to be had, {e}: this host")))?;
    let name = asked.name.unwrap_or_else(|| file_name(&asked.file));
    let export = Export { name, description: String::new(), disk, clients: asked.shared };
    Server::bind(&asked.nbd, export).and_then(|server| server.run(&stop)).map_err(Refusal::new)?;
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
        assert_eq!((good.nbd, good.shared, good.how.readonly), (PathBuf::from("s"), 3, true));
        assert!(asked(&["d.raw"]).unwrap_err().contains("--nbd SOCKET"));
        assert!(asked(&["--nbd", "s"]).unwrap_err().contains("no image named"));
        assert!(asked(&["--nbd", "s", "--shared=0", "d"]).unwrap_err().contains("1 to 256"));
        assert_eq!(file_name(Path::new("/a/b.raw")), "b.raw");
    }
}
