// SPDX-License-Identifier: Apache-2.0
//! Samples in clones of the lab machine: for hosts without hardware KVM. Native is the lab machine itself.
