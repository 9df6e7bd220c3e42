// SPDX-License-Identifier: Apache-2.0
//! Tells KVM which groups of devices a machine has: a device that snoops no caches needs the guest's own caching to hold.
//!
//! Called while the machine is made, and when devices come and go, by whoever adds or takes them.

use std::os::fd::RawFd;

use kvm_bindings::{
    KVM_DEV_VFIO_GROUP, KVM_DEV_VFIO_GROUP_ADD, KVM_DEV_VFIO_GROUP_DEL, kvm_create_device, kvm_device_attr,
    kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::DeviceFd;

use crate::{KvmError, Vm, call};

/// KVM's knowledge of the groups: it ends with this value.
pub struct VfioGroups {
    device: DeviceFd,
}

impl VfioGroups {
    /// Tells KVM of `group`.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn add(&self, group: RawFd) -> Result<(), KvmError> {
        self.set(KVM_DEV_VFIO_GROUP_ADD, group).map_err(call("KVM_DEV_VFIO_GROUP_ADD"))
    }

    /// Has KVM forget `group`, which it keeps open until then.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn remove(&self, group: RawFd) -> Result<(), KvmError> {
        self.set(KVM_DEV_VFIO_GROUP_DEL, group).map_err(call("KVM_DEV_VFIO_GROUP_DEL"))
    }

    fn set(&self, attr: u32, group: RawFd) -> Result<(), kvm_ioctls::Error> {
        let addr = std::ptr::from_ref(&group) as u64;
        let attr = kvm_device_attr { flags: 0, group: KVM_DEV_VFIO_GROUP, attr: attr.into(), addr };
        self.device.set_device_attr(&attr)
    }
}

impl Vm {
    /// What tells KVM of groups. `None` where KVM has no use for them.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn vfio_groups(&self) -> Result<Option<VfioGroups>, KvmError> {
        let mut device = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
        match self.vm_fd().create_device(&mut device) {
            Ok(device) => Ok(Some(VfioGroups { device })),
            Err(error) if error.errno() == libc::ENODEV => Ok(None),
            Err(error) => Err(call("KVM_CREATE_DEVICE of kind VFIO")(error)),
        }
    }
}
