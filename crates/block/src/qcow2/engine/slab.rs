// SPDX-License-Identifier: Apache-2.0
//! A list whose places are used again, for what a handle has in flight.

/// Values by number; the lowest free numbers are used first, more or less.
#[derive(Debug)]
pub struct Slab<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    /// Nothing in it.
    pub fn new() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }

    /// Keeps a value; its number.
    pub fn add(&mut self, value: T) -> u32 {
        if let Some(index) = self.free.pop() {
            if let Some(place) = self.places.get_mut(index as usize) {
                *place = Some(value);
            }
            return index;
        }
        self.places.push(Some(value));
        self.places.len() as u32 - 1
    }

    /// Takes a value out for a moment: its number stays taken until [`Slab::put`].
    pub fn take(&mut self, index: u32) -> Option<T> {
        self.places.get_mut(index as usize)?.take()
    }

    /// Puts it back.
    pub fn put(&mut self, index: u32, value: T) {
        if let Some(place) = self.places.get_mut(index as usize) {
            *place = Some(value);
        }
    }

    /// Takes a value out for good.
    pub fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.places.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(value)
    }

    /// The value.
    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.places.get_mut(index as usize)?.as_mut()
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }
}
