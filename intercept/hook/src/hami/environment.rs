//! Variables that the program was started with.

use core::ffi::{CStr, c_void};
use core::fmt::Write as _;

use crate::sys::{self, Fd, HERE, Map};

/// Variables that the program was started with.
pub(super) struct Environment {
    page: *mut c_void,
    length: usize,
}

impl Environment {
    /// More than the kernel passes to a program by default.
    const ROOM: usize = 4 << 20;

    /// Reads them. `None` if they cannot be read completely, and in programs with more rights than
    /// their caller.
    pub(super) fn read() -> Option<Self> {
        // SAFETY: reads a table of this process.
        if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
            return None;
        }
        let file = Fd::open_at(HERE, c"/proc/self/environ", libc::O_RDONLY)?;
        let mut read = Self { page: sys::map(Map::Private, Self::ROOM)?, length: 0 };
        loop {
            let place = read.room().get_mut(read.length..)?;
            match file.read_at(place, read.length as u64)? {
                0 => return Some(read),
                // It may not be complete.
                some if read.length + some >= Self::ROOM => return None,
                some => read.length += some,
            }
        }
    }

    fn room(&mut self) -> &'static mut [u8] {
        // SAFETY: a mapping of that length, used by one slice at a time and by none after it is
        // unmapped.
        unsafe { core::slice::from_raw_parts_mut(self.page.cast(), Self::ROOM) }
    }

    /// Returns the value of a variable.
    pub(super) fn get(&self, name: &[u8]) -> Option<&[u8]> {
        // SAFETY: the part of the mapping that was read, which lives as long as `self`.
        let text = unsafe { core::slice::from_raw_parts(self.page.cast::<u8>(), self.length) };
        let of_name =
            |line: &'_ [u8]| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(b"="));
        let line = text.split(|byte| *byte == 0).find(|line| of_name(line))?;
        line.get(name.len() + 1..)
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        // SAFETY: mapped by `read`; values do not outlive `self`.
        unsafe { sys::unmap(self.page, Self::ROOM) };
    }
}

/// Short text, terminated.
pub(super) struct Line<const ROOM: usize> {
    bytes: [u8; ROOM],
    length: usize,
}

impl<const ROOM: usize> Line<ROOM> {
    pub(super) fn of(text: core::fmt::Arguments<'_>) -> Option<Self> {
        let mut line = Self { bytes: [0; ROOM], length: 0 };
        line.write_fmt(text).ok()?;
        Some(line)
    }

    pub(super) fn text(&self) -> &str {
        core::str::from_utf8(self.bytes.get(..self.length).unwrap_or_default()).unwrap_or_default()
    }

    pub(super) fn c(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

impl<const ROOM: usize> core::fmt::Write for Line<ROOM> {
    /// Keeps the last byte 0.
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.length + text.len();
        let place =
            self.bytes.get_mut(self.length..end).filter(|_| end < ROOM).ok_or(core::fmt::Error)?;
        place.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}
