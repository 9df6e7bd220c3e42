// SPDX-License-Identifier: Apache-2.0
//! The virtio block device (virtio 1.2, 5.2).
