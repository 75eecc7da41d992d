//! Hash table of costs, in memory from the kernel.

use core::mem::size_of;
use core::ptr;

use crate::sys::{self, Map};

/// Cost of a pointer, a handle or an array.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Bytes charged.
    pub(crate) bytes: u64,
    /// Context that it ends with; 0: none.
    pub(crate) context: usize,
    /// The GPU, by its index in the state.
    pub(crate) gpu: u32,
    /// Number of holders: of physical memory, its handles, mappings and bindings.
    pub(crate) holders: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Entry<V> {
    /// 0: empty.
    key: u64,
    cost: V,
}

/// Table of costs or of other values by key. All zeroes is empty, and zeroes must be a valid value.
/// Linear probing; entries behind a removed one move up, so that there are no tombstones.
#[repr(C)]
pub(crate) struct Table<V = Cost> {
    entries: *mut Entry<V>,
    /// A power of two, or 0.
    room: usize,
    filled: usize,
}

/// 32 KiB at first.
const FIRST_ROOM: usize = 1024;

impl<V: Copy + Default> Table<V> {
    /// Makes room for one more entry. Returns false if the kernel has no memory.
    pub(crate) fn make_room(&mut self) -> bool {
        if (self.filled + 1) * 4 <= self.room * 3 {
            return true;
        }
        let room = if self.room == 0 { FIRST_ROOM } else { self.room * 2 };
        let Some(entries) = sys::map(Map::Private, room * size_of::<Entry<V>>()) else {
            return false;
        };
        let old = Self { entries: self.entries, room: self.room, filled: 0 };
        (self.entries, self.room, self.filled) = (entries.cast(), room, 0);
        for entry in old.entries() {
            self.put(entry.key, entry.cost);
        }
        if old.room > 0 {
            // SAFETY: the old entries were mapped with that length and are not used again.
            unsafe { sys::unmap(old.entries.cast(), old.room * size_of::<Entry<V>>()) };
        }
        true
    }

    /// Stores a value; there must be room. Returns the value before.
    pub(crate) fn put(&mut self, key: u64, cost: V) -> Option<V> {
        if key == 0 || self.room == 0 {
            return None;
        }
        let at = self.find(key);
        let entry = self.entries_mut().get_mut(at)?;
        let old = (entry.key == key).then_some(entry.cost);
        *entry = Entry { key, cost };
        self.filled += usize::from(old.is_none());
        old
    }

    /// Returns the value of a key, to be read or changed.
    pub(crate) fn get(&mut self, key: u64) -> Option<&mut V> {
        let at = self.place(key)?;
        Some(&mut self.entries_mut().get_mut(at)?.cost)
    }

    /// Removes a key and returns its value.
    pub(crate) fn remove(&mut self, key: u64) -> Option<V> {
        let mut hole = self.place(key)?;
        let cost = self.entries().get(hole)?.cost;
        let mut at = hole;
        loop {
            at = (at + 1) & (self.room - 1);
            let entry = *self.entries().get(at)?;
            if entry.key == 0 {
                break;
            }
            // It may move into the hole if its home is not between the hole and its place.
            let home = self.home(entry.key);
            let distance = |from: usize| at.wrapping_sub(from) & (self.room - 1);
            if distance(home) >= distance(hole) {
                *self.entries_mut().get_mut(hole)? = entry;
                hole = at;
            }
        }
        *self.entries_mut().get_mut(hole)? = Entry { key: 0, cost: V::default() };
        self.filled -= 1;
        Some(cost)
    }

    /// Returns the first key at or behind a place, and the next place: an iteration over a table
    /// that changes meanwhile. Keys that move meanwhile may be missed or come twice.
    pub(crate) fn key_from(&self, place: usize) -> Option<(u64, usize)> {
        let found = self.entries().iter().enumerate().skip(place).find(|(_, entry)| entry.key != 0);
        found.map(|(at, entry)| (entry.key, at + 1))
    }

    /// Calls `change` with every value.
    pub(crate) fn each(&mut self, mut change: impl FnMut(&mut V)) {
        for entry in self.entries_mut().iter_mut().filter(|entry| entry.key != 0) {
            change(&mut entry.cost);
        }
    }

    /// Removes the next entry at or behind `place` for which `goes` returns true, and sets `place`
    /// to its place. Calls that begin with 0 and end with `None` remove all of them in one pass.
    ///
    /// An entry that moves into the place of a removed one comes from behind it. Only entries at
    /// the beginning of the table, which were passed and stay, move past its end.
    pub(crate) fn remove_next(
        &mut self,
        place: &mut usize,
        goes: impl Fn(u64, &V) -> bool,
    ) -> Option<V> {
        let mut entries = self.entries().iter().enumerate().skip(*place);
        let (at, entry) =
            entries.find(|(_, entry)| entry.key != 0 && goes(entry.key, &entry.cost))?;
        *place = at;
        self.remove(entry.key)
    }

    fn home(&self, key: u64) -> usize {
        // Pointers are aligned: their low bits do not spread, the upper bits of a product with an
        // odd number do.
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.room - 1)
    }

    /// Returns the place of a key.
    fn place(&self, key: u64) -> Option<usize> {
        if key == 0 || self.room == 0 {
            return None;
        }
        let at = self.find(key);
        (self.entries().get(at)?.key == key).then_some(at)
    }

    /// Returns the place of a key, or the empty place for it.
    fn find(&self, key: u64) -> usize {
        let entries = self.entries();
        let mut at = self.home(key);
        while entries.get(at).is_some_and(|entry| entry.key != 0 && entry.key != key) {
            at = (at + 1) & (self.room - 1);
        }
        at
    }

    fn entries(&self) -> &[Entry<V>] {
        if self.room == 0 {
            return &[];
        }
        // SAFETY: mapped with that many entries; zeroes are valid entries.
        unsafe { &*ptr::slice_from_raw_parts(self.entries, self.room) }
    }

    fn entries_mut(&mut self) -> &mut [Entry<V>] {
        if self.room == 0 {
            return &mut [];
        }
        // SAFETY: as above, and borrowed exclusively with the table.
        unsafe { &mut *ptr::slice_from_raw_parts_mut(self.entries, self.room) }
    }
}

#[cfg(test)]
mod tests;
