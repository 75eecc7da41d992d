//! `cuGetProcAddress`: programs get hooks in the place of the driver's functions.
//!
//! The driver is called, and the hook is found by the address that it returns: one name has several
//! forms with different parameters, and only the driver knows which of them a program gets.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use tessera_intercept_symbols::{Class, Library, hash_of};

use super::route::hooks;
use super::{Route, all};
use crate::driver::cuda::{self, NOT_FOUND, SUCCESS};
use crate::unknown;

type GetProcAddress2 =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

type GetProcAddress1 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;

/// The driver's `cuGetProcAddress` in its newest form.
#[derive(Clone, Copy)]
enum GetProcAddress {
    /// Form of drivers before CUDA 12, which return an error for a function that they do not have.
    First(GetProcAddress1),
    Second(GetProcAddress2),
}

impl GetProcAddress {
    fn of_driver() -> Option<(Self, usize)> {
        // SAFETY: the types are those of cuda.h.
        unsafe {
            if let Some(address) = cuGetProcAddress_v2::ROUTE.function.address() {
                let function = core::mem::transmute::<usize, GetProcAddress2>(address);
                return Some((Self::Second(function), address));
            }
            let address = cuGetProcAddress::ROUTE.function.address()?;
            let function = core::mem::transmute::<usize, GetProcAddress1>(address);
            Some((Self::First(function), address))
        }
    }

    /// Returns the address that the driver returns for a function, 0 if it has no such function.
    fn address(self, route: &Route) -> usize {
        /// `CU_GET_PROC_ADDRESS_LEGACY_STREAM` and `..._PER_THREAD_DEFAULT_STREAM`.
        const LEGACY: u64 = 1;
        const PER_THREAD: u64 = 2;
        /// `CU_GET_PROC_ADDRESS_SUCCESS`
        const FOUND: c_int = 0;
        let flags = if route.per_thread { PER_THREAD } else { LEGACY };
        let (name, version) = (route.base.as_ptr(), route.version);
        let (mut found, mut status) = (core::ptr::null_mut(), FOUND);
        // SAFETY: a terminated name; the results go to local variables.
        let result = unsafe {
            match self {
                Self::First(function) => function(name, &mut found, version, flags),
                Self::Second(function) => function(name, &mut found, version, flags, &mut status),
            }
        };
        if result == SUCCESS && status == FOUND { found as usize } else { 0 }
    }
}

/// Routes by a number: an address of the driver, or the hash of a name. Open addressing; all zeroes
/// is empty. Threads that fill it at the same time write the same values.
struct Index {
    entries: [(AtomicU64, AtomicPtr<Route>); Index::ROOM],
}

impl Index {
    /// Two addresses of each route, at most half full.
    const ROOM: usize = 1024;

    const fn new() -> Self {
        Self {
            entries: [const { (AtomicU64::new(0), AtomicPtr::new(core::ptr::null_mut())) };
                Self::ROOM],
        }
    }

    fn clear(&self) {
        for (key, route) in &self.entries {
            key.store(0, Ordering::Relaxed);
            route.store(core::ptr::null_mut(), Ordering::Relaxed);
        }
    }

    /// Returns the entries at which a key may be, from the first on.
    fn places(&self, key: u64) -> impl Iterator<Item = &(AtomicU64, AtomicPtr<Route>)> {
        let first = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        (first..first + Self::ROOM).filter_map(|at| self.entries.get(at % Self::ROOM))
    }

    /// Adds a route unless the key has one: the first route of a key counts.
    fn add(&self, key: u64, route: &'static Route) {
        let is_own = |(other, _): &&(AtomicU64, AtomicPtr<Route>)| {
            let taken = other.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed);
            taken.map_or_else(|other| other == key, |_| true)
        };
        if key != 0
            && let Some((_, place)) = self.places(key).find(is_own)
        {
            let none = core::ptr::null_mut();
            let route = core::ptr::from_ref(route).cast_mut();
            let _ = place.compare_exchange(none, route, Ordering::Release, Ordering::Relaxed);
        }
    }

    fn get(&self, key: u64) -> Option<&'static Route> {
        let mut places =
            self.places(key).map(|(other, route)| (other.load(Ordering::Relaxed), route));
        let (_, route) = places.find(|(other, _)| *other == key || *other == 0)?;
        // SAFETY: NULL, or a static route.
        unsafe { route.load(Ordering::Acquire).as_ref() }
    }
}

/// Routes of CUDA's functions by each address that the driver has for them.
static BY_ADDRESS: Index = Index::new();

/// Routes of CUDA's functions by the hash of their name for `cuGetProcAddress`.
static BY_NAME: Index = Index::new();

/// Requests the address of each hooked function from the driver, once.
///
/// Threads that come here at the same time each request all addresses, which is idempotent: no lock
/// is held over the driver's calls, and no thread sees a part of the addresses.
fn learn_addresses() {
    static LEARNT_AT: AtomicUsize = AtomicUsize::new(0);
    let Some((get_proc_address, address)) = GetProcAddress::of_driver() else { return };
    let learnt_at = LEARNT_AT.load(Ordering::Acquire);
    if learnt_at == address {
        return;
    }
    if learnt_at != 0 {
        // The library was loaded again at another base.
        BY_ADDRESS.clear();
    }
    // For a version that is newer than its own, the driver would return an older form, which has
    // other parameters.
    let driver = cuda::driver_version().unwrap_or(c_int::MAX);
    for route in all().filter(|route| route.library() == Library::Cuda) {
        let returned = if route.version <= driver { get_proc_address.address(route) } else { 0 };
        BY_ADDRESS.add(returned as u64, route);
        BY_ADDRESS.add(route.function.address().unwrap_or(0) as u64, route);
        BY_NAME.add(hash_of(route.base.to_bytes()), route);
    }
    LEARNT_AT.store(address, Ordering::Release);
}

/// Replaces a function that the driver has returned by its hook.
///
/// A form that is newer than the symbol table is refused if it allocates memory or returns
/// functions: the limit would not hold. Other functions pass in such a form, and are counted:
/// without them, no program would run on a new driver.
///
/// # Safety
/// `out` is NULL, or the driver has written there; `name` is NULL or a terminated string.
unsafe fn replace(name: *const c_char, out: *mut *mut c_void, result: c_int) -> c_int {
    if result != SUCCESS || out.is_null() || name.is_null() {
        return result;
    }
    learn_addresses();
    // SAFETY: by this function's contract.
    let (given, name) = unsafe { (out.read_unaligned() as usize, CStr::from_ptr(name)) };
    if given == 0 {
        return result;
    }
    let put = |address: usize| {
        // SAFETY: by this function's contract.
        unsafe { out.write_unaligned(address as *mut c_void) };
    };
    if let Some(route) = BY_ADDRESS.get(given as u64) {
        put(route.hook());
        return result;
    }
    let known = BY_NAME.get(hash_of(name.to_bytes()));
    match known.filter(|route| route.base == name) {
        Some(route) if matches!(route.class, Class::Memory | Class::Resolves) => {
            put(0);
            return NOT_FOUND;
        }
        Some(_) => unknown::count(),
        None => unknown::note(name),
    }
    result
}

hooks! {
    fn cuGetProcAddress(name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) |real| {
        // SAFETY: the program's own call.
        unsafe { replace(name, out, real(name, out, version, flags)) }
    }

    fn cuGetProcAddress_ptsz(name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) |real| {
        // SAFETY: the program's own call.
        unsafe { replace(name, out, real(name, out, version, flags)) }
    }

    fn cuGetProcAddress_v2(
        name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { replace(name, out, real(name, out, version, flags, status)) }
    }

    fn cuGetProcAddress_v2_ptsz(
        name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { replace(name, out, real(name, out, version, flags, status)) }
    }
}
