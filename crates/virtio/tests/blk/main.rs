// SPDX-License-Identifier: Apache-2.0
//! The block device, driven through its queue by a played guest: what each request gets, right or wrong; random histories
//! against plain bytes; staged faults of the disk below.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod coalesce;
mod faults;
mod limits;
mod model;
mod queues;
mod requests;
mod rig;
mod several;
