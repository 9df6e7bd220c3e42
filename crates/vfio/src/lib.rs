// SPDX-License-Identifier: Apache-2.0
//! Devices of the host in a guest's hands (VFIO): which there are and what stands in the way, the container that says what
//! memory they reach, and a PCI function that the guest sees in place of the real one.
//!
//! `machine` owns a [`Container`] and puts each [`VfioPci`] on its bus; `tare passthrough` uses [`Sysfs`] alone. The device
//! itself is behind the trait [`Hardware`], so that everything above it is tested without one.

mod container;
mod device;
mod dma;
mod error;
mod intx;
mod iommufd;
mod layout;
mod msi;
mod msix;
mod sys;
mod sysfs;

pub use container::{Container, Opened};
pub use device::{Direct, VfioPci};
pub use dma::{DmaMaps, DmaSink};
pub use error::VfioError;
pub use layout::{Hardware, Interrupts, Region};
pub use sysfs::{Described, Kernel, Sysfs, VFIO_DRIVER};
