// SPDX-License-Identifier: Apache-2.0
//! qcow2: the format on paper (`format`), the editor of images that nobody uses (`offline`), and the engine that serves one.

pub(crate) mod engine;
pub mod format;
pub mod offline;
