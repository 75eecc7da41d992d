//! Libraries that are opened at run time.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use crate::report::Failure;

/// An open library, which stays open until the program exits.
#[derive(Debug)]
pub(crate) struct Library(*mut c_void);

impl Library {
    /// Opens a library.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| failed("dlopen", "the path has a NUL byte".to_owned()))?;
        // SAFETY: the name is terminated; initialisers of a driver library may run.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() { Err(failed("dlopen", last_error())) } else { Ok(Self(handle)) }
    }

    /// Finds a function.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to the function.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, Failure> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the library is open and the name is terminated.
        let pointer = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if pointer.is_null() {
            return Err(failed(&format!("dlsym {}", name.to_string_lossy()), last_error()));
        }
        // SAFETY: the sizes are equal (asserted above), and the caller guarantees the type.
        Ok(unsafe { std::mem::transmute_copy(&pointer) })
    }
}

fn failed(call: &str, name: String) -> Failure {
    Failure { call: call.to_owned(), code: -1, name }
}

fn last_error() -> String {
    // SAFETY: `dlerror` has no preconditions; the string is valid until the next call in this
    // thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: the string was just returned and is terminated.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
