//! What each pointer costs: a hash table in memory from the kernel.

use core::mem::size_of;
use core::ptr;

use crate::sys::{self, Map};

/// What is remembered of a pointer, a handle or an array.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Bytes charged.
    pub(crate) bytes: u64,
    /// The context it goes away with; 0 = none.
    pub(crate) context: usize,
    /// Index of the GPU among those of the state.
    pub(crate) gpu: u32,
    /// How many hold it: for physical memory, its handles and its mappings.
    pub(crate) holders: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Entry<V> {
    /// 0 = empty.
    key: u64,
    cost: V,
}

/// A table of costs, or of what else is known by a key. All zeroes is empty, and zeroes must be a
/// value. Linear probing; entries behind a removed one move up, so that there are no graves.
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
    /// Makes room for one more. `false` where the kernel has no memory.
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

    /// Remembers a cost; there must be room. Answers the one that was there.
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

    /// The cost of a key, to be read or changed.
    pub(crate) fn get(&mut self, key: u64) -> Option<&mut V> {
        let at = self.place(key)?;
        Some(&mut self.entries_mut().get_mut(at)?.cost)
    }

    /// Forgets a key.
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
            // It may move into the hole if its own place is not between the hole and where it is.
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

    /// The first key at or behind a place, and the place behind it; to go through a table that
    /// changes meanwhile. Keys that move while that goes on may be missed or come twice.
    pub(crate) fn key_from(&self, place: usize) -> Option<(u64, usize)> {
        let found = self.entries().iter().enumerate().skip(place).find(|(_, entry)| entry.key != 0);
        found.map(|(at, entry)| (entry.key, at + 1))
    }

    /// Calls `change` with every entry.
    pub(crate) fn each(&mut self, mut change: impl FnMut(&mut V)) {
        for entry in self.entries_mut().iter_mut().filter(|entry| entry.key != 0) {
            change(&mut entry.cost);
        }
    }

    /// Removes the next entry at or behind `place` that goes, and sets `place` to where it was.
    /// Calls that begin with 0 and end with `None` remove all that go, in one pass.
    ///
    /// An entry that moves into the place of a removed one comes from behind it. Only entries that
    /// were passed at the begin of the table move past its end, and those stay.
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
        // Pointers are multiples of something: the upper bits of a product with an odd number are
        // not.
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.room - 1)
    }

    /// Where the key is.
    fn place(&self, key: u64) -> Option<usize> {
        if key == 0 || self.room == 0 {
            return None;
        }
        let at = self.find(key);
        (self.entries().get(at)?.key == key).then_some(at)
    }

    /// Where the key is, or the empty place where it would be.
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
