// SPDX-License-Identifier: Apache-2.0
//! A host made of files: which way a device takes behind the IOMMU there, and what a refusal says.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;
use crate::sysfs::Kernel;

/// Nothing is written here.
struct Still;

impl Kernel for Still {
    fn write(&self, _: &Path, _: &str) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}

/// A tree with a disk (0000:01:00.0, group 7) that vfio-pci has and a card (0000:02:00.0, group 8) that it has not.
fn tree() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (address, driver, group) in [("0000:01:00.0", "vfio-pci", 7), ("0000:02:00.0", "e1000e", 8)] {
        let device = folder.path().join("sys/bus/pci/devices").join(address);
        let driver = folder.path().join("sys/bus/pci/drivers").join(driver);
        let group = folder.path().join(format!("sys/kernel/iommu_groups/{group}"));
        for dir in [&device, &driver, &group.join("devices"), &folder.path().join("dev/vfio/devices")] {
            fs::create_dir_all(dir).unwrap();
        }
        for (name, text) in [("vendor", "0x1b36"), ("device", "0x0010"), ("class", "0x010802")] {
            fs::write(device.join(name), text).unwrap();
        }
        symlink(driver, device.join("driver")).unwrap();
        symlink(&device, group.join("devices").join(address)).unwrap();
        symlink(group, device.join("iommu_group")).unwrap();
    }
    folder
}

fn sysfs(folder: &tempfile::TempDir) -> Sysfs {
    Sysfs::at(folder.path(), Box::new(Still))
}

fn wants(address: &str, iommu: Iommu) -> Vfio {
    Vfio { host: address.parse().unwrap(), iommu }
}

/// The device's own node, as the kernel shows and makes it.
fn with_node(folder: &tempfile::TempDir) -> PathBuf {
    fs::create_dir_all(folder.path().join("sys/bus/pci/devices/0000:01:00.0/vfio-dev/vfio3")).unwrap();
    let node = folder.path().join("dev/vfio/devices/vfio3");
    fs::write(&node, "").unwrap();
    node
}

const DISK: &str = "0000:01:00.0";

#[test]
fn iommufd_is_taken_where_it_and_the_devices_own_node_are_there() {
    let folder = tree();
    let host = sysfs(&folder);
    let disk = DISK.parse().unwrap();
    assert_eq!((host.node(disk), host.way(disk)), (None, Iommu::Container));
    fs::write(folder.path().join("dev/iommu"), "").unwrap();
    assert_eq!(host.way(disk), Iommu::Container, "a device of an older kernel has no node");
    let node = with_node(&folder);
    assert_eq!((host.node(disk), host.way(disk)), (Some(node.clone()), Iommu::Iommufd));
    fs::remove_file(folder.path().join("dev/iommu")).unwrap();
    assert_eq!(host.way(disk), Iommu::Container);
    fs::write(folder.path().join("dev/iommu"), "").unwrap();
    fs::remove_file(node).unwrap();
    assert_eq!((host.node(disk), host.way(disk)), (None, Iommu::Container), "known to sysfs, and nothing to open");
}

#[test]
fn the_first_device_says_what_is_opened() {
    let folder = tree();
    let said = |address, iommu| Container::of(sysfs(&folder), &wants(address, iommu)).err().unwrap().to_string();
    assert!(said(DISK, Iommu::Auto).starts_with("cannot open /dev/vfio/vfio: "), "no iommufd");
    let none = said(DISK, Iommu::Iommufd);
    assert!(none.starts_with("cannot open /dev/iommu: No such file"), "{none}");
    assert!(none.contains("CONFIG_IOMMUFD") && none.ends_with("iommu=container does without"), "{none}");
    fs::write(folder.path().join("dev/iommu"), "").unwrap();
    with_node(&folder);
    // A file is no iommufd: it gets as far as asking.
    assert!(said(DISK, Iommu::Auto).starts_with("cannot open /dev/iommu: Inappropriate ioctl"));
    assert!(said(DISK, Iommu::Container).starts_with("cannot open /dev/vfio/vfio: No such file"));
    let bound = said("0000:02:00.0", Iommu::Iommufd);
    assert!(
        bound.starts_with("0000:02:00.0 belongs to e1000e, not to vfio-pci: --vfio; "),
        "before anything is opened"
    );
    assert!(said("0000:09:00.0", Iommu::Auto).starts_with("this host has no PCI device"));
}

#[test]
fn refusals_of_the_kernel_have_names() {
    let folder = tree();
    let host = sysfs(&folder);
    let node = with_node(&folder);
    let said = |group, code| {
        let source = io::Error::from_raw_os_error(code);
        unbindable(&host, (DISK.parse().unwrap(), group), &node, source).to_string()
    };
    let in_use = said(7, libc::EINVAL);
    assert!(
        in_use.starts_with("0000:01:00.0 is in use, another process has ") && in_use.contains("vfio3: --vfio; end")
    );
    assert!(
        said(7, libc::EBUSY).contains("dev/vfio/7: --vfio; end that machine first"),
        "somebody has it the other way"
    );
    for code in [libc::EBUSY, libc::EPERM] {
        let shared = said(8, code);
        assert!(shared.contains("group 8 has 0000:02:00.0 (e1000e) too: --vfio; hand those over"), "{shared}");
    }
    let unsafe_interrupts = said(7, libc::EPERM);
    assert!(unsafe_interrupts.starts_with("cannot put 0000:01:00.0 behind the IOMMU: Operation not permitted"));
    assert!(unsafe_interrupts.contains("iommufd.allow_unsafe_interrupts=1"), "{unsafe_interrupts}");
    assert!(said(7, libc::EIO).ends_with("the host's kernel log says more"));
    fs::create_dir_all(folder.path().join("proc/17/fd")).unwrap();
    symlink(&node, folder.path().join("proc/17/fd/5")).unwrap();
    assert!(
        said(7, libc::EPERM).contains("dev/vfio/7: --vfio; end that machine first"),
        "its group is another process's"
    );
}

#[test]
fn a_machine_has_one_way_and_kvm_hears_of_each_device_that_comes_and_goes() {
    let folder = tree();
    with_node(&folder);
    let iommu = folder.path().join("dev/iommu");
    fs::write(&iommu, "").unwrap();
    let ioas = Ioas::fake(fs::File::options().read(true).write(true).open(iommu).unwrap());
    let mut all = Container { devices: Vec::new(), way: Way::Iommufd(ioas), sysfs: sysfs(&folder) };
    assert_eq!(all.iommu(), Iommu::Iommufd);
    let refused = all.claim(&wants(DISK, Iommu::Container)).unwrap_err().to_string();
    let wanted = "0000:01:00.0 has iommu=container, and other devices of the machine are behind iommu=iommufd: --vfio; say the \
                  same for all of them, or leave iommu= out";
    assert_eq!(refused, wanted);
    assert!(all.is_empty());
    let disk = DISK.parse().unwrap();
    let told = all.claim(&wants(DISK, Iommu::Auto)).unwrap();
    assert!(told.is_some() && told == all.closes(disk), "its own, known before it is opened");
    // The tree has files where the kernel has devices.
    let said = all.device(disk).err().unwrap().to_string();
    assert!(said.starts_with("cannot put 0000:01:00.0 behind the IOMMU: Inappropriate ioctl"), "{said}");
    assert!(all.is_last(disk) && !all.is_empty());
    all.release(disk);
    assert!(all.is_empty() && all.closes(disk).is_none());
    fs::remove_file(folder.path().join("dev/vfio/devices/vfio3")).unwrap();
    let none = all.claim(&wants(DISK, Iommu::Iommufd)).unwrap_err().to_string();
    assert!(none.starts_with("0000:01:00.0 has no node of its own in /dev/vfio/devices: --vfio; "), "{none}");
}

#[test]
fn without_groups_a_device_is_taken_while_its_node_is_open() {
    let folder = tree();
    let host = sysfs(&folder);
    let node = with_node(&folder);
    let disk = host.describe(DISK.parse().unwrap()).unwrap();
    assert!(!host.is_taken(&disk));
    let files = folder.path().join("proc/17/fd");
    fs::create_dir_all(&files).unwrap();
    symlink("/dev/null", files.join("0")).unwrap();
    assert!(!host.is_taken(&disk));
    symlink(node, files.join("5")).unwrap();
    assert!(host.is_taken(&disk));
    fs::write(folder.path().join("dev/vfio/7"), "").unwrap();
    assert!(!host.is_taken(&disk), "where there are groups, the kernel says");
}
