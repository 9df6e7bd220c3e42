// SPDX-License-Identifier: Apache-2.0
//! What a vhost-user client's messages mean for the block device: memory and rings are noted as they come, and the device
//! runs on the rings that are complete. Every change of a running ring stops the device after what it has in flight, and
//! starts it again where the used index is. Called by the connection's thread, one message at a time.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use base::{EventFd, Gpa};
use block::Disk;
use mem::{GuestRam, SharedRange};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, Result, VhostUserBackendReqHandlerMut};
use virtio::blk::Blk;
use virtio::{Activation, ActiveQueue, DeviceStatus, Interrupt, QueueConfig, QueueIrq, VirtioDevice, features};

use super::fds::eventfd;

/// Bytes of configuration space that a client may ask for.
const CONFIG_LEN: u32 = 256;

/// One ring as the client described it.
struct Ring {
    config: QueueConfig,
    /// Where the driver's index is when the ring starts.
    base: u16,
    kick: Option<EventFd>,
    call: Option<EventFd>,
    enabled: bool,
    /// Addresses were set.
    placed: bool,
}

/// A part of the client's memory: where the client has it, and where the guest.
struct Region {
    user: u64,
    len: u64,
    guest: Gpa,
}

/// The device and what the present client said of it.
pub struct Backend {
    device: Blk,
    agreed: u64,
    ram: Option<GuestRam>,
    regions: Vec<Region>,
    rings: Vec<Ring>,
    /// The device has the rings.
    running: bool,
}

/// The calls of the rings that run.
struct Calls(Vec<Option<EventFd>>);

impl Interrupt for Calls {
    fn queue(&self, index: u16) {
        if let Some(Some(call)) = self.0.get(usize::from(index)) {
            // A full counter is as good as one more.
            let _ = call.write(1);
        }
    }

    fn config(&self) {}
}

/// The client is gone: the device stops, and all that was the client's goes.
pub fn end(backend: &Mutex<Backend>) {
    backend.lock().unwrap_or_else(PoisonError::into_inner).forget();
}

impl Backend {
    /// A device for `disk`.
    pub fn new(disk: Disk, spec: &spec::Disk) -> Self {
        let device = Blk::new(disk, spec);
        let mut backend = Self { device, agreed: 0, ram: None, regions: Vec::new(), rings: Vec::new(), running: false };
        backend.forget();
        backend
    }

    fn forget(&mut self) {
        self.stop();
        self.agreed = 0;
        self.ram = None;
        self.regions.clear();
        let fresh = |size: &u16| Ring {
            config: QueueConfig::new(*size),
            base: 0,
            kick: None,
            call: None,
            enabled: false,
            placed: false,
        };
        self.rings = self.device.queue_sizes().iter().map(fresh).collect();
    }

    /// Stops the device after what it has in flight, and notes where each ring is.
    fn stop(&mut self) {
        if !std::mem::take(&mut self.running) {
            return;
        }
        self.device.reset();
        for ring in &mut self.rings {
            // Everything that was taken was given back, so that the two indexes are the same. (2.7.8: the used ring's
            // index is its second field.)
            let used = ring.config.used.checked_add(2);
            if let (true, Some(ram), Some(at)) = (ring.config.enabled, &self.ram, used) {
                ring.base = ram.read::<u16>(at).unwrap_or(ring.base);
            }
            ring.config.enabled = false;
        }
    }

    /// Stops the device and starts it again on the rings that are complete.
    fn refresh(&mut self) -> Result<()> {
        self.stop();
        let Some(ram) = &self.ram else { return Ok(()) };
        let mut queues = Vec::new();
        let calls = self.rings.iter().map(|ring| ring.call.as_ref().and_then(|c| c.try_clone().ok())).collect();
        let face: Arc<dyn Interrupt> = Arc::new(Calls(calls));
        for (index, ring) in (0..).zip(&mut self.rings) {
            let Some(kick) = ring.kick.as_ref().filter(|_| ring.enabled && ring.placed) else { continue };
            let mut queue = ring.config.activate(ram, self.agreed).map_err(|_| Error::InvalidParam)?;
            queue.resume_at(ring.base);
            // Whatever the driver made available before this is looked at first.
            let kick = kick.try_clone().map_err(Error::ReqHandlerError)?;
            let _ = kick.write(1);
            ring.config.enabled = true;
            queues.push(ActiveQueue { index, ring: queue, kick, irq: QueueIrq::new(Arc::clone(&face), index) });
        }
        if queues.is_empty() {
            return Ok(());
        }
        let status = Arc::new(DeviceStatus::new(face));
        let activation = Activation { ram: ram.clone(), features: self.agreed, queues, status };
        self.running = true;
        self.device.activate(activation).map_err(Error::ReqHandlerError)
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// The guest's address of what the client has at `user`.
    fn guest(&self, user: u64) -> Result<Gpa> {
        self.regions
            .iter()
            .find_map(|r| user.checked_sub(r.user).filter(|at| *at < r.len).and_then(|at| r.guest.checked_add(at)))
            .ok_or(Error::InvalidParam)
    }
}

fn offered(device: &Blk) -> u64 {
    // A ring that changes restarts the device, which forgets the write cache's switch: none is offered.
    device.features() & !virtio::blk::CONFIG_WCE
        | features::TRANSPORT
        | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
}

fn refused<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.forget();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.forget();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(offered(&self.device))
    }

    fn set_features(&mut self, agreed: u64) -> Result<()> {
        if agreed & !offered(&self.device) != 0 {
            return Err(Error::InvalidParam);
        }
        self.stop();
        self.agreed = agreed;
        // Without the protocol's features rings are enabled from the start.
        if agreed & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            self.rings.iter_mut().for_each(|ring| ring.enabled = true);
        }
        self.refresh()
    }

    fn set_mem_table(
        &mut self,
        table: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        self.stop();
        let ranges: Vec<SharedRange<'_>> = table
            .iter()
            .zip(&files)
            .map(|(r, file)| SharedRange {
                at: Gpa(r.guest_phys_addr),
                len: r.memory_size,
                file,
                offset: r.mmap_offset,
            })
            .collect();
        let ram = GuestRam::shared(&ranges).map_err(|e| Error::ReqHandlerError(io::Error::other(e.to_string())))?;
        self.ram = Some(ram);
        self.regions = table
            .iter()
            .map(|r| Region { user: r.user_addr, len: r.memory_size, guest: Gpa(r.guest_phys_addr) })
            .collect();
        self.refresh()?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.stop();
        let size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        self.ring(index)?.config.set_size(size).map_err(|_| Error::InvalidParam)?;
        self.refresh()
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.stop();
        let [desc, used, avail] = [self.guest(descriptor)?, self.guest(used)?, self.guest(available)?];
        let ring = self.ring(index)?;
        (ring.config.desc, ring.config.used, ring.config.avail) = (desc, used, avail);
        ring.placed = true;
        self.refresh()
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.stop();
        self.ring(index)?.base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.refresh()
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        // The ring stops; the others go on.
        self.stop();
        let ring = self.ring(index)?;
        (ring.kick, ring.call) = (None, None);
        let base = ring.base;
        self.refresh()?;
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        // A client that polls instead of kicking is not served: `None` is how it says so.
        let kick = fd.and_then(eventfd).ok_or(Error::InvalidParam)?;
        self.stop();
        self.ring(index.into())?.kick = Some(kick);
        self.refresh()
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let call = fd.map(|file| eventfd(file).ok_or(Error::InvalidParam)).transpose()?;
        self.stop();
        self.ring(index.into())?.call = call;
        self.refresh()
    }

    fn set_vring_err(&mut self, _index: u8, _fd: Option<File>) -> Result<()> {
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::REPLY_ACK)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.stop();
        self.ring(index)?.enabled = enable;
        self.refresh()
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        if offset.checked_add(size).is_none_or(|end| end > CONFIG_LEN) {
            return Err(Error::InvalidParam);
        }
        let mut data = vec![0; size as usize];
        self.device.read_config(offset.into(), &mut data);
        Ok(data)
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        self.device.write_config(offset.into(), buf);
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu: vhost::vhost_user::GpuBackend) -> Result<()> {
        refused("no graphics")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        refused("no shared objects")
    }

    fn get_inflight_fd(&mut self, _inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        refused("no log of requests in flight")
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        refused("no log of requests in flight")
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        refused("memory comes as one table")
    }

    fn add_mem_region(
        &mut self,
        _region: &VhostUserSingleMemoryRegion,
        _fd: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        refused("memory comes as one table")
    }

    fn remove_mem_region(&mut self, _region: &VhostUserSingleMemoryRegion) -> Result<()> {
        refused("memory comes as one table")
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        refused("no state beyond the rings")
    }

    fn check_device_state(&mut self) -> Result<()> {
        refused("no state beyond the rings")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        refused("no memory of the device's own")
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        refused("no log of dirty pages")
    }
}
