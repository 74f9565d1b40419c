//! The opened library, and the ids of communicators.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;

use crate::result::{Error, Status, Unavailable};
use crate::sys::{Functions, UNIQUE_ID_BYTES, UniqueId};

/// The environment variable that names the library; where it is set, no other name is tried.
pub const LIBRARY_VARIABLE: &str = "NCCL_LIBRARY";

/// The environment variable that names the directory whose `lib` has the library; tried before the system's loader.
pub const HOME_VARIABLE: &str = "NCCL_HOME";

/// Names under which the system's loader may know the library.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// An opened libnccl. It stays loaded until the process ends, as its threads may outlive any handle.
#[derive(Clone)]
pub struct Library {
    pub(super) functions: Arc<Functions>,
    name: String,
}

impl Library {
    /// Opens the library that [`LIBRARY_VARIABLE`] names, or the one under [`HOME_VARIABLE`], or the one that the
    /// system's loader finds.
    ///
    /// # Errors
    /// [`Unavailable`] with everything that was tried.
    pub fn open() -> Result<Self, Unavailable> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(name) = set(LIBRARY_VARIABLE) {
            return Self::open_first(&[&name.to_string_lossy()]);
        }
        let home = set(HOME_VARIABLE).map(|home| Path::new(&home).join("lib").join(NAMES[0]));
        let home = home.map(|path| path.to_string_lossy().into_owned());
        let names: Vec<&str> = home.as_deref().into_iter().chain(NAMES).collect();
        Self::open_first(&names)
    }

    /// Opens the first of `names`, paths or file names, that is NCCL.
    ///
    /// # Errors
    /// [`Unavailable`] with everything that was tried.
    pub fn open_first(names: &[&str]) -> Result<Self, Unavailable> {
        let mut tried = Vec::new();
        for &name in names {
            match load(name) {
                Ok(functions) => return Ok(Self { functions: Arc::new(functions), name: name.to_owned() }),
                Err(error) => tried.push(format!("{name}: {error}")),
            }
        }
        Err(Unavailable { tried })
    }

    /// The name it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Major, minor and patch of the library's version.
    ///
    /// # Errors
    /// NCCL's status.
    pub fn version(&self) -> Result<(u32, u32, u32), Error> {
        let mut code: c_int = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("ncclGetVersion", unsafe { (self.functions.get_version)(&mut code) })?;
        Ok(version_of(code))
    }

    /// A new id: one rank creates it and sends it to all others.
    ///
    /// # Errors
    /// NCCL's status.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId { internal: [0; UNIQUE_ID_BYTES] };
        // SAFETY: the pointer is to a live id.
        self.check("ncclGetUniqueId", unsafe { (self.functions.get_unique_id)(&mut id) })?;
        Ok(id)
    }

    /// Runs `calls` as one group: sends and receives in it make progress together. Where one thread issues for several
    /// communicators, each of its collectives is a group.
    ///
    /// # Errors
    /// The first error of `calls`, else that of the group; the group is ended in any case.
    pub fn group<R>(&self, calls: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
        // SAFETY: the functions take nothing.
        self.check("ncclGroupStart", unsafe { (self.functions.group_start)() })?;
        let result = calls();
        // SAFETY: as above; the group was started.
        let ended = self.issued("ncclGroupEnd", unsafe { (self.functions.group_end)() });
        result.and_then(|value| ended.map(|()| value))
    }

    /// Whether `ncclAlltoAll` is there.
    pub fn has_all_to_all(&self) -> bool {
        self.functions.all_to_all.is_some()
    }

    /// The error of a status other than success.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        let Some(status) = Status::of(code) else { return Ok(()) };
        // SAFETY: NCCL returns a static string for every code; null is guarded against.
        let mut detail = unsafe { text((self.functions.get_error_string)(code)) };
        if let Some(last) = self.functions.get_last_error {
            // SAFETY: the communicator is unused, as the header says, and the string is static.
            let more = unsafe { text(last(std::ptr::null_mut())) };
            if !more.is_empty() {
                detail = format!("{detail}: {}", more.trim());
            }
        }
        Err(Error::Failed { call, status, detail })
    }

    /// As [`check`](Self::check), for a call that may complete in the background.
    pub(super) fn issued(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        match Status::of(code) {
            None | Some(Status::IN_PROGRESS) => Ok(()),
            Some(_) => self.check(call, code),
        }
    }
}

/// A C string; empty when null.
///
/// # Safety
/// The pointer is null or a live string.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: the caller vouches for the string, which is not null.
    let string = unsafe { CStr::from_ptr(string) };
    string.to_string_lossy().into_owned()
}

/// Since 2.9 the code is major·10000 + minor·100 + patch; before, major·1000.
fn version_of(code: c_int) -> (u32, u32, u32) {
    let code = u32::try_from(code).unwrap_or(0);
    let unit = if code < 10_000 { 1000 } else { 10_000 };
    (code / unit, code % unit / 100, code % 100)
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Loads and never unloads.
fn load(name: &str) -> Result<Functions, libloading::Error> {
    // SAFETY: loading runs the library's initialisers; the name is NCCL's or one that the user gave for it.
    let library = ManuallyDrop::new(unsafe { libloading::Library::new(name)? });
    // SAFETY: a library that has all of these symbols is taken to be NCCL, and it stays loaded.
    unsafe { Functions::load(&library) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_reported_with_the_names_that_were_tried() {
        let error =
            Library::open_first(&["libnccl-that-is-not-there.so.2", "neither-is-this.so"]).unwrap_err();
        assert_eq!(error.tried.len(), 2);
        assert!(error.to_string().contains("libnccl-that-is-not-there.so.2"), "{error}");
    }

    #[test]
    fn a_library_that_is_not_nccl_is_refused() {
        let error = Library::open_first(&["libc.so.6"]).unwrap_err();
        assert!(error.to_string().contains("libc.so.6"), "{error}");
    }

    #[test]
    fn version_codes_are_read_as_the_header_writes_them() {
        assert_eq!(version_of(23_203), (2, 32, 3));
        assert_eq!(version_of(2_804), (2, 8, 4));
    }
}
