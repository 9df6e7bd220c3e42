// SPDX-License-Identifier: Apache-2.0
//! Tells KVM which groups of devices a machine has: a device that snoops no caches needs the guest's own caching to hold.
//!
//! Called on the main thread while the machine is made.

use std::os::fd::RawFd;

use kvm_bindings::{
    KVM_DEV_VFIO_GROUP, KVM_DEV_VFIO_GROUP_ADD, kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::DeviceFd;

use crate::{KvmError, Vm, call};

/// KVM's knowledge of the groups: it ends with this value.
pub struct VfioGroups {
    _device: DeviceFd,
}

impl Vm {
    /// Tells KVM of `groups`. `None` where KVM has no use for them.
    ///
    /// # Errors
    /// [`KvmError::Call`].
    pub fn tell_vfio_groups(&self, groups: &[RawFd]) -> Result<Option<VfioGroups>, KvmError> {
        let mut device = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
        let device = match self.vm_fd().create_device(&mut device) {
            Ok(device) => device,
            Err(error) if error.errno() == libc::ENODEV => return Ok(None),
            Err(error) => return Err(call("KVM_CREATE_DEVICE of kind VFIO")(error)),
        };
        for group in groups {
            let addr = std::ptr::from_ref(group) as u64;
            let attr =
                kvm_device_attr { flags: 0, group: KVM_DEV_VFIO_GROUP, attr: KVM_DEV_VFIO_GROUP_ADD.into(), addr };
            device.set_device_attr(&attr).map_err(call("KVM_DEV_VFIO_GROUP_ADD"))?;
        }
        Ok(Some(VfioGroups { _device: device }))
    }
}
