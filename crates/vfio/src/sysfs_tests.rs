// SPDX-License-Identifier: Apache-2.0
//! A tree that looks like sysfs, and something that moves its links as the kernel would.

use std::os::unix::fs::symlink;
use std::rc::Rc;

use super::*;

/// Answers writes. `stubborn`: vfio-pci takes nothing.
struct Fake {
    folder: PathBuf,
    stubborn: bool,
}

impl Kernel for Fake {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let name = path.file_name().unwrap().to_str().unwrap();
        let pci = self.folder.join("sys/bus/pci");
        let device = |text: &str| pci.join("devices").join(text.trim());
        let attach = |device: &Path, driver: &str| {
            if self.stubborn && driver == VFIO_DRIVER || device.join("driver").exists() {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            symlink(pci.join("drivers").join(driver), device.join("driver"))
        };
        match name {
            "driver_override" => fs::write(path, text),
            "unbind" => fs::remove_file(device(text).join("driver")),
            "bind" => attach(&device(text), path.parent().unwrap().file_name().unwrap().to_str().unwrap()),
            "drivers_probe" => {
                let wish = fs::read_to_string(device(text).join("driver_override")).unwrap_or_default();
                let own = fs::read_to_string(device(text).join("own")).unwrap_or_default();
                match (wish.trim(), own.trim()) {
                    ("", "") => Ok(()),
                    ("", own) => attach(&device(text), own),
                    (wish, _) => attach(&device(text), wish),
                }
            }
            _ => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }
}

struct Host {
    folder: Rc<tempfile::TempDir>,
    sysfs: Sysfs,
}

fn at(text: &str) -> PciAddress {
    text.parse().unwrap()
}

impl Host {
    fn new(stubborn: bool) -> Self {
        let folder = Rc::new(tempfile::tempdir().unwrap());
        let root = folder.path();
        for dir in ["sys/bus/pci/devices", "sys/bus/pci/drivers/vfio-pci", "sys/class/block", "proc/self", "dev/vfio"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        let kernel = Fake { folder: root.to_owned(), stubborn };
        let host = Self { sysfs: Sysfs::at(root, Box::new(kernel)), folder };
        host.device("0000:00:01.0", "0x060400", "pcieport", Some(1));
        host.device("0000:01:00.0", "0x010802", "nvme", Some(7));
        host.device("0000:02:00.0", "0x020000", "e1000e", Some(8));
        host.device("0000:02:00.1", "0x0c0330", "xhci_hcd", Some(8));
        host.device("0000:03:00.0", "0x030000", "", None);
        host
    }

    fn path(&self, inside: &str) -> PathBuf {
        self.folder.path().join(inside)
    }

    /// A device whose own driver is `driver`, and which has it.
    fn device(&self, address: &str, class: &str, driver: &str, group: Option<u32>) {
        let real = self.path(&format!("sys/devices/pci/{address}"));
        fs::create_dir_all(&real).unwrap();
        for (name, text) in [
            ("vendor", "0x1b36"),
            ("device", "0x0010"),
            ("class", class),
            ("driver_override", "(null)\n"),
            ("own", driver),
        ] {
            fs::write(real.join(name), text).unwrap();
        }
        symlink(&real, self.path("sys/bus/pci/devices").join(address)).unwrap();
        if !driver.is_empty() {
            let driver = self.path("sys/bus/pci/drivers").join(driver);
            fs::create_dir_all(&driver).unwrap();
            symlink(driver, real.join("driver")).unwrap();
        }
        if let Some(group) = group {
            let group = self.path(&format!("sys/kernel/iommu_groups/{group}"));
            fs::create_dir_all(group.join("devices")).unwrap();
            symlink(&real, group.join("devices").join(address)).unwrap();
            symlink(&group, real.join("iommu_group")).unwrap();
        }
    }

    fn driver(&self, address: &str) -> Option<String> {
        self.sysfs.describe(at(address)).unwrap().driver
    }

    fn wish(&self, address: &str) -> String {
        fs::read_to_string(self.path("sys/bus/pci/devices").join(address).join("driver_override")).unwrap()
    }
}

#[test]
fn devices_are_shown_with_groups_and_drivers() {
    let host = Host::new(false);
    let all = host.sysfs.devices();
    let shown: Vec<_> = all.iter().map(|d| (d.address.to_string(), d.kind(), d.group, d.owner())).collect();
    assert_eq!(shown[1], ("0000:01:00.0".to_owned(), "NVMe disk", Some(7), "nvme".to_owned()));
    assert_eq!(shown[4], ("0000:03:00.0".to_owned(), "display", None, "no driver".to_owned()));
    assert!(all[0].is_bridge() && !all[1].is_bridge());
    let way: Vec<_> = host.sysfs.in_the_way(8).iter().map(|d| d.address.to_string()).collect();
    assert_eq!(way, ["0000:02:00.0", "0000:02:00.1"]);
    assert!(host.sysfs.in_the_way(1).is_empty(), "bridges let go");
    assert!(matches!(host.sysfs.describe(at("09:00.0")), Err(VfioError::Missing(_))));
}

#[test]
fn a_device_goes_to_vfio_and_comes_back() {
    let host = Host::new(false);
    let nvme = "0000:01:00.0";
    assert_eq!(host.sysfs.bind(at(nvme), false).unwrap().as_deref(), Some("nvme"));
    assert_eq!((host.driver(nvme).as_deref(), host.wish(nvme).as_str()), (Some("vfio-pci"), "vfio-pci"));
    assert_eq!(host.sysfs.bind(at(nvme), false).unwrap().as_deref(), Some("vfio-pci"), "twice is once");
    assert_eq!(host.sysfs.unbind(at(nvme)).unwrap().as_deref(), Some("nvme"));
    assert_eq!(host.wish(nvme).trim(), "");
    assert_eq!(host.sysfs.unbind(at(nvme)).unwrap().as_deref(), Some("nvme"), "what is not bound stays");
}

#[test]
fn a_device_that_vfio_does_not_take_keeps_its_driver_and_its_wish() {
    let host = Host::new(true);
    let nvme = "0000:01:00.0";
    let said = host.sysfs.bind(at(nvme), false).unwrap_err().to_string();
    assert!(said.starts_with("cannot give 0000:01:00.0 to vfio-pci: ") && said.contains("it is as it was"), "{said}");
    assert_eq!((host.driver(nvme).as_deref(), host.wish(nvme).trim()), (Some("nvme"), ""));
    fs::write(host.path("sys/bus/pci/devices/0000:01:00.0/driver_override"), "nvme\n").unwrap();
    assert!(host.sysfs.bind(at(nvme), false).is_err());
    assert_eq!((host.driver(nvme).as_deref(), host.wish(nvme).trim()), (Some("nvme"), "nvme"));
}

#[test]
fn what_stands_in_the_way_is_named_before_anything_is_touched() {
    let host = Host::new(false);
    let said = |address: &str| host.sysfs.bind(at(address), false).unwrap_err().to_string();
    assert!(said("03:00.0").starts_with("0000:03:00.0 is in no IOMMU group: --vfio; switch the IOMMU on"));
    assert!(said("00:01.0").starts_with("0000:00:01.0 is a bridge"));
    assert!(said("09:00.0").contains("no PCI device 0000:09:00.0"));
    // A disk with a mounted partition, an interface that is up.
    let disk = host.path("sys/devices/pci/0000:01:00.0/nvme/nvme0/nvme0n1");
    let part = disk.join("nvme0n1p1");
    fs::create_dir_all(part.join("holders")).unwrap();
    for (at, number) in [(&disk, "259:0\n"), (&part, "259:1\n")] {
        fs::write(at.join("dev"), number).unwrap();
        symlink(at, host.path("sys/class/block").join(at.file_name().unwrap())).unwrap();
    }
    fs::write(host.path("proc/self/mountinfo"), "30 1 259:1 / /srv rw - ext4 /dev/nvme0n1p1 rw\n").unwrap();
    assert_eq!(
        said("01:00.0"),
        "0000:01:00.0 is in use, /dev/nvme0n1p1 is mounted at /srv: bind; end that use first, or say --force and lose what it holds"
    );
    let net = host.path("sys/devices/pci/0000:02:00.0/net/eth0");
    fs::create_dir_all(&net).unwrap();
    fs::write(net.join("flags"), "0x1003\n").unwrap();
    assert!(said("02:00.0").contains("network interface eth0 is up"));
    assert_eq!(host.driver("01:00.0").as_deref(), Some("nvme"));
    assert_eq!(host.sysfs.bind(at("01:00.0"), true).unwrap().as_deref(), Some("nvme"), "unless it is forced");
    fs::write(net.join("flags"), "0x1002\n").unwrap();
    assert!(host.sysfs.bind(at("02:00.0"), false).is_ok());
    fs::remove_dir(host.path("sys/bus/pci/drivers/vfio-pci")).unwrap();
    assert!(said("02:00.1").contains("which is not loaded"));
}

#[test]
fn disks_of_a_subsystem_belong_to_its_controllers() {
    let host = Host::new(false);
    let controller = host.path("sys/devices/pci/0000:01:00.0/nvme/nvme0");
    let disk = host.path("sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1");
    fs::create_dir_all(&controller).unwrap();
    fs::create_dir_all(&disk).unwrap();
    symlink(&controller, disk.parent().unwrap().join("nvme0")).unwrap();
    fs::write(disk.join("dev"), "259:0\n").unwrap();
    symlink(&disk, host.path("sys/class/block/nvme0n1")).unwrap();
    fs::write(host.path("proc/swaps"), "Filename Type\n/dev/nvme0n1 partition 1 0 -2\n").unwrap();
    assert_eq!(host.sysfs.uses(at("01:00.0")), ["/dev/nvme0n1 is swap space"]);
    assert!(host.sysfs.uses(at("02:00.0")).is_empty());
}
