// SPDX-License-Identifier: Apache-2.0
//! The guests' kernel module (`guests/vioapic-linux`), built against the headers of the guests' own kernel.
//!
//! Debian's packages are fetched and unpacked into the cache, not installed: the machine's own kernel is another one, and its
//! package lists stay as they are. Called by `tare-lab host module` and by suites whose guests need the module.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::cache::{Cache, Key};
use super::process::run;
use super::{Progress, image, recipe};

/// The module's source, and how the kernel's makefiles are told of it.
const SOURCE: &str = include_str!("../../../../guests/vioapic-linux/vioapic.c");
const KBUILD: &str = include_str!("../../../../guests/vioapic-linux/Kbuild");
/// Its name.
const FILE: &str = "vioapic.ko";
/// Longest time for the headers to be fetched, and for anything else.
const FETCH: Duration = Duration::from_secs(600);
const TOOL: Duration = Duration::from_secs(180);

/// The packages that a module for kernel `release` is built with: its headers, those that its flavours share, and the build's
/// own programs.
fn packages(release: &str) -> Result<[String; 3]> {
    let (version, _flavour) = release.split_once("-cloud-").with_context(|| format!("odd kernel release {release}"))?;
    let series: Vec<&str> = version.splitn(3, '.').take(2).collect();
    Ok([
        format!("linux-headers-{release}"),
        format!("linux-headers-{version}-common"),
        format!("linux-kbuild-{}", series.join(".")),
    ])
}

/// The headers of kernel `release`: the folder to build in.
fn headers(cache: &Cache, release: &str) -> Result<PathBuf> {
    let packages = packages(release)?;
    let key = Key::default().with("release", recipe::RELEASE).with("packages", packages.join(" "));
    let folder = cache.get("headers", key, &mut |folder| {
        let log = folder.join("log");
        fs::write(folder.join("sources.list"), image::sources_of_this_machine()?)?;
        for sub in ["state/lists/partial", "cache/archives/partial", "debs"] {
            fs::create_dir_all(folder.join(sub))?;
        }
        let apt = |words: &[&str]| {
            let mut command = Command::new("apt-get");
            let own = |name: &str, path: &str| format!("{name}={}", folder.join(path).display());
            command.args(["--quiet", "-o", "Dir::Etc::SourceParts=-", "-o", "APT::Sandbox::User=root"]);
            command.args(["-o", &own("Dir::Etc::SourceList", "sources.list"), "-o", &own("Dir::State", "state")]);
            command.args(["-o", &own("Dir::Cache", "cache"), "-o", "Dir::State::status=/var/lib/dpkg/status"]);
            command.args(words).current_dir(folder.join("debs"));
            command
        };
        run(&mut apt(&["update"]), FETCH, &log)?;
        let fetch: Vec<&str> = std::iter::once("download").chain(packages.iter().map(String::as_str)).collect();
        run(&mut apt(&fetch), FETCH, &log).context(
            "the packages of the guests' kernel are gone from Debian: `make clean-cache` has the images made anew",
        )?;
        for deb in fs::read_dir(folder.join("debs"))? {
            run(Command::new("dpkg-deb").arg("--extract").arg(deb?.path()).arg(folder.join("root")), TOOL, &log)?;
        }
        for done in ["debs", "state", "cache"] {
            fs::remove_dir_all(folder.join(done))?;
        }
        // The package's makefile names its installed place; this one finds the other package beside it.
        let common = packages.get(1).map(String::as_str).unwrap_or_default();
        fs::write(tree(folder, release).join("Makefile"), format!("include ../{common}/Makefile\n"))?;
        Ok(())
    })?;
    Ok(tree(&folder, release))
}

fn tree(folder: &Path, release: &str) -> PathBuf {
    folder.join(format!("root/usr/src/linux-headers-{release}"))
}

/// The module for the guests' kernel, built if it is not there.
///
/// # Errors
/// When its headers can't be fetched, or the compiler says no; the text quotes it.
pub fn vioapic(cache: &Cache, progress: Progress<'_>) -> Result<PathBuf> {
    let release = image::guest(cache, progress)?.release()?;
    let key = Key::default().with("release", &release).with("source", SOURCE).with("kbuild", KBUILD);
    let folder = cache.get("module", key, &mut |folder| {
        progress("kernel module: fetching headers", Some(0.2));
        let headers = headers(cache, &release)?;
        progress("kernel module: building", Some(0.8));
        fs::write(folder.join("vioapic.c"), SOURCE)?;
        fs::write(folder.join("Kbuild"), KBUILD)?;
        let mut make = Command::new("make");
        make.arg("-C").arg(&headers).arg(format!("M={}", folder.display())).args(["KCFLAGS=-Werror", "modules"]);
        // What this program's own make left in the environment is none of the kernel's business.
        for name in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "GNUMAKEFLAGS"] {
            make.env_remove(name);
        }
        run(&mut make, TOOL, &folder.join("log"))?;
        anyhow::ensure!(folder.join(FILE).is_file(), "the kernel's makefiles made no {FILE}");
        Ok(())
    })?;
    Ok(folder.join(FILE))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_has_three_packages_to_build_for_it() {
        let expected = ["linux-headers-6.1.0-56-cloud-amd64", "linux-headers-6.1.0-56-common", "linux-kbuild-6.1"];
        assert_eq!(packages("6.1.0-56-cloud-amd64").unwrap(), expected);
        assert!(packages("6.1.0").unwrap_err().to_string().contains("6.1.0"));
    }

    #[test]
    fn the_source_says_its_licence() {
        assert!(
            SOURCE.starts_with("// SPDX-License-Identifier: GPL-2.0\n") && SOURCE.contains("MODULE_LICENSE(\"GPL\")")
        );
    }
}
