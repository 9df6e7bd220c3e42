// SPDX-License-Identifier: Apache-2.0
//! Tells KVM which devices a machine has, by their groups or by themselves: a device that snoops no caches needs the guest's
//! own caching to hold, and one that wants to know its machine looks for it while it is opened.
//!
//! Called while the machine is made, and when devices come and go, by whoever adds or takes them.

use std::os::fd::RawFd;

use kvm_bindings::{
    KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_DEV_VFIO_FILE_DEL, kvm_create_device, kvm_device_attr,
    kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::DeviceFd;

use crate::{KvmError, Vm, call};

/// KVM's knowledge of the devices: it ends with this value. Kernels that know groups alone have the same numbers for them.
pub struct VfioFiles {
    device: DeviceFd,
}

impl VfioFiles {
    /// Tells KVM of `file`: a group, or a device that is not bound yet.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn add(&self, file: RawFd) -> Result<(), KvmError> {
        self.set(KVM_DEV_VFIO_FILE_ADD, file).map_err(call("KVM_DEV_VFIO_FILE_ADD"))
    }

    /// Has KVM forget `file`, which it keeps open until then.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn remove(&self, file: RawFd) -> Result<(), KvmError> {
        self.set(KVM_DEV_VFIO_FILE_DEL, file).map_err(call("KVM_DEV_VFIO_FILE_DEL"))
    }

    fn set(&self, attr: u32, file: RawFd) -> Result<(), kvm_ioctls::Error> {
        let addr = std::ptr::from_ref(&file) as u64;
        let attr = kvm_device_attr { flags: 0, group: KVM_DEV_VFIO_FILE, attr: attr.into(), addr };
        self.device.set_device_attr(&attr)
    }
}

impl Vm {
    /// What tells KVM of devices. `None` where KVM has no use for them.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn vfio_files(&self) -> Result<Option<VfioFiles>, KvmError> {
        let mut device = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
        match self.vm_fd().create_device(&mut device) {
            Ok(device) => Ok(Some(VfioFiles { device })),
            Err(error) if error.errno() == libc::ENODEV => Ok(None),
            Err(error) => Err(call("KVM_CREATE_DEVICE of kind VFIO")(error)),
        }
    }
}
