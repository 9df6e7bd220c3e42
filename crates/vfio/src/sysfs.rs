// SPDX-License-Identifier: Apache-2.0
//! PCI devices of the host as sysfs shows them: groups, drivers, what uses them; and how they change drivers.
//!
//! `tare passthrough` and [`Container`](crate::Container) ask here, on the main thread. What is written goes through
//! [`Kernel`], so that tests can stand a tree of their own in its place.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use spec::{Iommu, PciAddress};

use crate::error::VfioError;

/// The driver that hands devices on.
pub const VFIO_DRIVER: &str = "vfio-pci";

/// What sysfs does when something is written to it.
pub trait Kernel: Send {
    /// Writes `text` to the attribute at `path`.
    ///
    /// # Errors
    /// The kernel's.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
}

/// The real one.
struct Running;

impl Kernel for Running {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        // No truncation and no creation: it is an attribute or nothing.
        io::Write::write_all(&mut fs::File::options().write(true).open(path)?, text.as_bytes())
    }
}

/// A sysfs.
pub struct Sysfs {
    root: PathBuf,
    /// Where mounts and swap are told.
    proc: PathBuf,
    dev: PathBuf,
    kernel: Box<dyn Kernel>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Where it is.
    pub address: PciAddress,
    /// Vendor and device id.
    pub ids: (u16, u16),
    /// Class, subclass and programming interface.
    pub class: u32,
    /// Whose it is.
    pub driver: Option<String>,
    /// Its IOMMU group.
    pub group: Option<u32>,
}

impl Described {
    /// Its driver for a sentence.
    #[must_use]
    pub fn owner(&self) -> String {
        self.driver.clone().unwrap_or_else(|| "no driver".to_owned())
    }

    /// Whether it is a bridge: those stay with the host, and VFIO lets them.
    #[must_use]
    pub const fn is_bridge(&self) -> bool {
        self.class >> 16 == 0x06
    }

    /// Whether the rest of its group can be handed on while it has this driver, as VFIO sees it.
    #[must_use]
    pub fn lets_go(&self) -> bool {
        matches!(self.driver.as_deref(), None | Some(VFIO_DRIVER | "pci-stub" | "pcieport"))
    }

    /// What it is, in a word or two.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match (self.class >> 16, self.class >> 8 & 0xff) {
            (0x01, 0x08) => "NVMe disk",
            (0x01, _) => "storage",
            (0x02, _) => "network",
            (0x03, _) => "display",
            (0x04, _) => "multimedia",
            (0x05, _) => "memory",
            (0x06, _) => "bridge",
            (0x0c, 0x03) => "USB",
            (0x0c, _) => "serial bus",
            (0x12, _) => "accelerator",
            _ => "device",
        }
    }
}

fn name_of(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// A number in hexadecimal from an attribute.
fn number(path: &Path) -> Option<u32> {
    let text = fs::read_to_string(path).ok()?;
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
    found.sort();
    found
}

impl Sysfs {
    /// That of this host.
    #[must_use]
    pub fn host() -> Self {
        Self { root: "/sys".into(), proc: "/proc".into(), dev: "/dev".into(), kernel: Box::new(Running) }
    }

    /// One with its parts in `folder` (`sys`, `proc`, `dev`), and something that answers writes.
    #[must_use]
    pub fn at(folder: &Path, kernel: Box<dyn Kernel>) -> Self {
        Self { root: folder.join("sys"), proc: folder.join("proc"), dev: folder.join("dev"), kernel }
    }

    fn device(&self, address: PciAddress) -> PathBuf {
        self.root.join("bus/pci/devices").join(address.to_string())
    }

    fn driver(&self, name: &str) -> PathBuf {
        self.root.join("bus/pci/drivers").join(name)
    }

    /// The device at `address`.
    ///
    /// # Errors
    /// [`VfioError::Missing`].
    pub fn describe(&self, address: PciAddress) -> Result<Described, VfioError> {
        let at = self.device(address);
        let id = |name: &str| number(&at.join(name)).map(|n| n as u16);
        let (Some(vendor), Some(device)) = (id("vendor"), id("device")) else {
            return Err(VfioError::Missing(address));
        };
        Ok(Described {
            address,
            ids: (vendor, device),
            class: number(&at.join("class")).unwrap_or(0),
            driver: name_of(&at.join("driver")),
            group: name_of(&at.join("iommu_group")).and_then(|name| name.parse().ok()),
        })
    }

    fn all_in(&self, folder: &Path) -> Vec<Described> {
        let addresses = entries(folder).into_iter().filter_map(|path| path.file_name()?.to_str()?.parse().ok());
        addresses.filter_map(|address| self.describe(address).ok()).collect()
    }

    /// All devices, by address.
    #[must_use]
    pub fn devices(&self) -> Vec<Described> {
        self.all_in(&self.root.join("bus/pci/devices"))
    }

    /// The devices of a group that keep the others from being handed on; a group that is gone has none.
    #[must_use]
    pub fn in_the_way(&self, group: u32) -> Vec<Described> {
        let mut members = self.all_in(&self.root.join(format!("kernel/iommu_groups/{group}/devices")));
        members.retain(|device| !device.lets_go());
        members
    }

    /// The same for a sentence: addresses and drivers.
    pub(crate) fn others(&self, group: u32) -> String {
        let others = self.in_the_way(group);
        others.iter().map(|d| format!("{} ({})", d.address, d.owner())).collect::<Vec<_>>().join(" and ")
    }

    /// Where iommufd is.
    pub(crate) fn iommu(&self) -> PathBuf {
        self.dev.join("iommu")
    }

    /// Where the container and groups are.
    pub(crate) fn vfio(&self) -> PathBuf {
        self.dev.join("vfio")
    }

    /// The own node of the device at `address`: only vfio-pci's have one, under a kernel that gives them.
    pub(crate) fn node(&self, address: PciAddress) -> Option<PathBuf> {
        let all = entries(&self.device(address).join("vfio-dev"));
        let nodes = all.iter().filter_map(|path| Some(self.vfio().join("devices").join(path.file_name()?)));
        nodes.into_iter().find(|node| node.exists())
    }

    /// How the device at `address` gets behind the IOMMU where nobody says: through iommufd if that and the device's own
    /// node are there and this user may open them, else through the container.
    #[must_use]
    pub fn way(&self, address: PciAddress) -> Iommu {
        let opens = |path: &Path| fs::File::options().read(true).write(true).open(path).is_ok();
        let node = self.node(address).filter(|node| opens(&self.iommu()) && opens(node));
        if node.is_some() { Iommu::Iommufd } else { Iommu::Container }
    }

    /// What the host does with the device at `address`: file systems, swap, volumes, interfaces that are up, machines.
    #[must_use]
    pub fn uses(&self, address: PciAddress) -> Vec<String> {
        let Ok(home) = self.device(address).canonicalize() else { return Vec::new() };
        let mut uses = Vec::new();
        let text = |name: &str| fs::read_to_string(self.proc.join(name)).unwrap_or_default();
        let (mounts, swaps) = (text("self/mountinfo"), text("swaps"));
        for disk in entries(&self.root.join("class/block")) {
            let (Some(name), Ok(at)) =
                (disk.file_name().map(|n| n.to_string_lossy().into_owned()), disk.canonicalize())
            else {
                continue;
            };
            if !is_below(&at, &home) {
                continue;
            }
            let node = format!("/dev/{name}");
            let number = fs::read_to_string(at.join("dev")).unwrap_or_default();
            let mounted = |line: &str| {
                let words: Vec<&str> = line.split_ascii_whitespace().collect();
                let same = words.get(2).is_some_and(|n| *n == number.trim()) || words.contains(&node.as_str());
                words.get(4).filter(|_| same).map(|place| format!("{node} is mounted at {place}"))
            };
            uses.extend(mounts.lines().find_map(mounted));
            if swaps.lines().any(|line| line.split_ascii_whitespace().next() == Some(&node)) {
                uses.push(format!("{node} is swap space"));
            }
            uses.extend(
                entries(&at.join("holders"))
                    .first()
                    .and_then(|h| h.file_name())
                    .map(|holder| format!("{node} is a part of {}", holder.to_string_lossy())),
            );
        }
        for interface in entries(&home.join("net")) {
            let flags = number(&interface.join("flags")).unwrap_or(0);
            if let Some(name) = interface.file_name().filter(|_| flags & libc::IFF_UP as u32 != 0) {
                uses.push(format!("network interface {} is up", name.to_string_lossy()));
            }
        }
        uses
    }

    /// Whether a machine has this device or its group.
    #[must_use]
    pub fn is_taken(&self, device: &Described) -> bool {
        let Some(group) = device.group.filter(|_| device.driver.as_deref() == Some(VFIO_DRIVER)) else { return false };
        let opened = fs::File::options().read(true).write(true).open(self.vfio().join(group.to_string()));
        match opened.map_err(|error| error.raw_os_error()) {
            Err(Some(libc::EBUSY)) => true,
            // A kernel without groups does not say who has a device: its node is in somebody's hands, or is not.
            Err(Some(libc::ENOENT)) => self.node(device.address).is_some_and(|node| self.is_open(&node)),
            _ => false,
        }
    }

    /// Whether another process that this user may look into has the file at `path` open.
    fn is_open(&self, path: &Path) -> bool {
        let other = |process: &PathBuf| {
            let number = process.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
            number.is_some_and(|number| number != std::process::id())
        };
        let processes = entries(&self.proc).into_iter().filter(other);
        let files = processes.flat_map(|process| entries(&process.join("fd")));
        files.into_iter().any(|file| fs::read_link(file).is_ok_and(|target| target == path))
    }

    /// Hands the device at `address` to vfio-pci; what it was before, if anything. A failure leaves it where it was. `force`
    /// takes it from whatever uses it.
    ///
    /// # Errors
    /// What stands in the way, and what to do.
    pub fn bind(&self, address: PciAddress, force: bool) -> Result<Option<String>, VfioError> {
        let found = self.describe(address)?;
        if found.driver.as_deref() == Some(VFIO_DRIVER) {
            return Ok(found.driver);
        }
        if found.group.is_none() {
            return Err(VfioError::NoIommu(address));
        }
        if found.is_bridge() {
            return Err(VfioError::Unfit { address, why: "is a bridge".to_owned(), hint: "name a device behind it" });
        }
        if !self.driver(VFIO_DRIVER).is_dir() {
            let gone = io::Error::from(io::ErrorKind::NotFound);
            let what = format!("give {address} to vfio-pci, which is not loaded");
            return Err(VfioError::host(what, "load it with `modprobe vfio-pci`")(gone));
        }
        if let Some(user) = self.uses(address).into_iter().next().filter(|_| !force) {
            let hint = "end that use first, or say --force and lose what it holds";
            return Err(VfioError::InUse { address, user, place: "bind", hint });
        }
        let before = found.driver.clone();
        let wish = self.wish(address);
        let change = || {
            self.write(address, "driver_override", VFIO_DRIVER)?;
            if before.is_some() {
                self.write(address, "driver/unbind", &address.to_string())?;
            }
            self.probe(address)
        };
        let changed = change();
        let now = self.describe(address)?.driver;
        if changed.is_ok() && now.as_deref() == Some(VFIO_DRIVER) {
            return Ok(before);
        }
        // Back to what it was.
        let _ = self.write(address, "driver_override", &wish);
        if let Some(driver) = before.as_deref().filter(|before| now.as_deref() != Some(before)) {
            let _ = self.kernel.write(&self.driver(driver).join("bind"), &address.to_string());
        }
        let source = changed.err().unwrap_or_else(|| io::Error::other("vfio-pci did not take it"));
        Err(VfioError::host(format!("give {address} to vfio-pci"), "it is as it was; the host's kernel log says more")(
            source,
        ))
    }

    /// Gives the device at `address` back to the driver that the kernel chooses; who that is, if anybody.
    ///
    /// # Errors
    /// What stands in the way, and what to do.
    pub fn unbind(&self, address: PciAddress) -> Result<Option<String>, VfioError> {
        let found = self.describe(address)?;
        if found.driver.as_deref() == Some(VFIO_DRIVER) {
            if self.is_taken(&found) {
                // The kernel would wait for as long as the machine runs.
                return Err(VfioError::InUse {
                    address,
                    user: format!("a machine has its group {}", found.group.unwrap_or_default()),
                    place: "unbind",
                    hint: "end that machine first",
                });
            }
            let failed = |what: &str| {
                VfioError::host(
                    format!("{what} {address}"),
                    "the host's kernel log says more; `tare passthrough list` how it is",
                )
            };
            self.write(address, "driver_override", "\n").map_err(failed("clear the choice of a driver for"))?;
            let unbound = self.write(address, "driver/unbind", &address.to_string());
            if let Err(source) = unbound {
                let _ = self.write(address, "driver_override", VFIO_DRIVER);
                return Err(failed("take vfio-pci off")(source));
            }
            // No driver at all is an answer, too.
            let _ = self.probe(address);
        }
        Ok(self.describe(address)?.driver)
    }

    /// Which driver it was to have before, as `driver_override` wants to be told.
    fn wish(&self, address: PciAddress) -> String {
        let text = fs::read_to_string(self.device(address).join("driver_override")).unwrap_or_default();
        match text.trim() {
            "" | "(null)" => "\n".to_owned(),
            driver => driver.to_owned(),
        }
    }

    fn write(&self, address: PciAddress, attribute: &str, text: &str) -> io::Result<()> {
        self.kernel.write(&self.device(address).join(attribute), text)
    }

    fn probe(&self, address: PciAddress) -> io::Result<()> {
        self.kernel.write(&self.root.join("bus/pci/drivers_probe"), &address.to_string())
    }
}

/// Whether the disk at `at` belongs to the device at `home`: it lies below it, or one of the controllers beside it does, as
/// those of an NVMe subsystem.
fn is_below(at: &Path, home: &Path) -> bool {
    let beside = || entries(at.parent().unwrap_or(at)).into_iter().filter(|path| path.is_symlink());
    let partition_of = at.parent().filter(|_| at.join("partition").exists());
    at.starts_with(home)
        || beside().filter_map(|path| path.canonicalize().ok()).any(|path| path.starts_with(home))
        || partition_of.is_some_and(|disk| is_below(disk, home))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[path = "sysfs_tests.rs"]
mod tests;
