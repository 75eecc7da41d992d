//! Limits by HAMi-core's variables in a container without the directory of grants (feature `hami`).
//!
//! Every GPU gets a share at its first use: a grant made from the variables, in memory of this
//! process, and a ledger in a file that the container's processes share, at HAMi's path with the
//! GPU's UUID appended. If one of them cannot be made, there is no memory. The variables are those
//! that the program was started with: later changes have no effect.
//!
//! The file at HAMi's path itself is for HAMi's monitor ([`monitor`]). Ledgers count; that file
//! shows what they contain.

mod environment;
mod monitor;
mod reporter;

use core::ffi::CStr;

use environment::{Environment, Line};
pub(crate) use monitor::{Shown, before_launch};
pub(crate) use reporter::Reporter;
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
        // Without a limit, there is nothing beyond the GPU that it could promise.
        oversubscribe: memory != MemoryVariable::Unlimited && variables.oversubscribes(),
        mps: false,
        claim_uid: Text::new("hami").ok()?,
        id: Text::new(name.text()).ok()?,
        sequence: 0,
    };
    let path = path(&environment, name.c())?;
    let (ledger, identity) = map_ledger(&open_or_make(&path, &ledger::initial(), LEDGER_LEN)?)?;
    let page = in_memory(&grant)?;
    let shown = monitor::show(&variables, &name, index, &grant);
    let share = Share::new(FoundGrant { name: name.c(), page, grant, ledger, identity })?;
    Some(share.shown_in(shown))
}

/// Opens the ledger of a share again.
pub(crate) fn reopen_ledger(name: &CStr) -> Option<Fd> {
    if !name.to_bytes().starts_with(b"GPU-") {
        return None;
    }
    open_shared(path(&Environment::read()?, name)?.c())
}

fn open_shared(path: &CStr) -> Option<Fd> {
    Fd::open_at(HERE, path, libc::O_RDWR)
}

/// Opens a file that the container's processes share, or creates it. Opening comes first: in a
/// directory that all users may write, a file of another user cannot be opened with `O_CREAT`.
fn open_or_make(path: &Line<PATH_ROOM>, start: &[u8], length: usize) -> Option<Fd> {
    open_shared(path.c()).or_else(|| {
        let temporary = Line::<PATH_ROOM>::of(format_args!("{}.{}", path.text(), sys::pid()))?;
        sys::make_shared_file(path.c(), temporary.c(), start, length);
        open_shared(path.c())
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
