//! Limits by HAMi-core's variables in a container without the directory of grants (feature `hami`).
//!
//! Every GPU gets a share at its first use: a grant made from the variables, in memory of this
//! process, and a ledger in a file that the container's processes share, at HAMi's path with the
//! GPU's UUID appended. If one of them cannot be made, there is no memory. The variables are those
//! that the program was started with: later changes have no effect.

use core::ffi::{CStr, c_void};
use core::fmt::Write as _;

use tessera_intercept_abi::{
    ComputePolicy, GRANT_LEN, GpuUuid, Grant, LEDGER_LEN, MAX_MEMORY_BYTES, Text, ledger,
};
use tessera_intercept_hami::{MemoryVariable, Variables};

use crate::grants::{FoundGrant, map_ledger};
use crate::share::Share;
use crate::sys::{self, Fd, HERE, Map};

/// Length of the longest path with its NUL.
const PATH_ROOM: usize = 512;

/// Returns the share of a GPU; `ordinal` is its CUDA device, if known.
pub(crate) fn share_of(gpu: GpuUuid, ordinal: Option<usize>) -> Option<Share> {
    let environment = Environment::read()?;
    let variables = Variables(|name: &[u8]| environment.get(name));
    let index = ordinal.map(|ordinal| variables.gpu_of(ordinal));
    let memory = index.map_or_else(|| variables.least_memory(), |index| variables.memory(index));
    let cores = index.map_or_else(|| variables.least_cores(), |index| variables.cores(index));
    let name = Line::<48>::of(format_args!("{gpu}"))?;
    let grant = Grant {
        gpu_uuid: gpu,
        memory_limit_bytes: match memory {
            MemoryVariable::Unlimited => MAX_MEMORY_BYTES,
            MemoryVariable::Bytes(bytes) => bytes.min(MAX_MEMORY_BYTES),
        },
        context_bytes: 0,
        cores_percent: cores.unwrap_or(0),
        policy: if cores.is_some() { ComputePolicy::Fixed } else { ComputePolicy::None },
        oversubscribe: false,
        mps: false,
        claim_uid: Text::new("hami").ok()?,
        id: Text::new(name.text()).ok()?,
        sequence: 0,
    };
    let (ledger, identity) = map_ledger(&open_or_make_ledger(&environment, name.c())?)?;
    let page = in_memory(&grant)?;
    Share::new(FoundGrant { name: name.c(), page, grant, ledger, identity })
}

/// Opens the ledger of a share again.
pub(crate) fn reopen_ledger(name: &CStr) -> Option<Fd> {
    if !name.to_bytes().starts_with(b"GPU-") {
        return None;
    }
    open_ledger(path(&Environment::read()?, name)?.c())
}

fn open_ledger(path: &CStr) -> Option<Fd> {
    Fd::open_at(HERE, path, libc::O_RDWR)
}

/// Opens the ledger, or creates it. Opening comes first: in a directory that all users may write, a
/// file of another user cannot be opened with `O_CREAT`.
fn open_or_make_ledger(environment: &Environment, name: &CStr) -> Option<Fd> {
    let path = path(environment, name)?;
    open_ledger(path.c()).or_else(|| {
        let temporary = Line::<PATH_ROOM>::of(format_args!("{}.{}", path.text(), sys::pid()))?;
        sys::make_shared_file(path.c(), temporary.c(), &ledger::initial(), LEDGER_LEN);
        open_ledger(path.c())
    })
}

fn path(environment: &Environment, name: &CStr) -> Option<Line<PATH_ROOM>> {
    let cache = Variables(|name: &[u8]| environment.get(name)).cache();
    Line::of(format_args!("{}.{}", core::str::from_utf8(cache).ok()?, name.to_str().ok()?))
}

/// Returns a copy of a grant in a page, as if it were mapped.
fn in_memory(grant: &Grant) -> Option<*const u8> {
    let bytes = grant.encode().ok()?;
    let page = sys::map(Map::Private, GRANT_LEN)?.cast::<u8>();
    // SAFETY: a new mapping of that length, which is never unmapped.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), page, GRANT_LEN) };
    Some(page)
}

/// Variables that the program was started with.
struct Environment {
    page: *mut c_void,
    length: usize,
}

impl Environment {
    /// More than the kernel passes to a program by default.
    const ROOM: usize = 4 << 20;

    /// Reads them. `None` if they cannot be read completely, and in programs with more rights than
    /// their caller.
    fn read() -> Option<Self> {
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
    fn get(&self, name: &[u8]) -> Option<&[u8]> {
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
struct Line<const ROOM: usize> {
    bytes: [u8; ROOM],
    length: usize,
}

impl<const ROOM: usize> Line<ROOM> {
    fn of(text: core::fmt::Arguments<'_>) -> Option<Self> {
        let mut line = Self { bytes: [0; ROOM], length: 0 };
        line.write_fmt(text).ok()?;
        Some(line)
    }

    fn text(&self) -> &str {
        core::str::from_utf8(self.bytes.get(..self.length).unwrap_or_default()).unwrap_or_default()
    }

    fn c(&self) -> &CStr {
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
