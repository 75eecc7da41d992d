//! Libraries that are opened when the program runs.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use crate::report::Failure;

/// An open library. It stays open until the program ends.
#[derive(Debug)]
pub(crate) struct Library(*mut c_void);

impl Library {
    /// Opens it.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| failed("dlopen", "a path with a NUL in it".to_owned()))?;
        // SAFETY: the name is a terminated string; initialisers of a driver library may run.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() { Err(failed("dlopen", last_error())) } else { Ok(Self(handle)) }
    }

    /// Finds a function.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to that function.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, Failure> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle is open and the name is a terminated string.
        let pointer = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if pointer.is_null() {
            return Err(failed(&format!("dlsym {}", name.to_string_lossy()), last_error()));
        }
        // SAFETY: of the same size (asserted above); the caller vouches for the type.
        Ok(unsafe { std::mem::transmute_copy(&pointer) })
    }
}

fn failed(call: &str, name: String) -> Failure {
    Failure { call: call.to_owned(), code: -1, name }
}

fn last_error() -> String {
    // SAFETY: no preconditions; the string lives until the next call in this thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: a terminated string, just returned.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
