//! What of CUDA is on this machine. cudarc opens libraries on first use and panics without them; everything here asks
//! first.

use std::env;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use cudarc::{cublaslt, driver, nvrtc};

use super::error::{CudaError, Part, Unavailable};

/// The environment variable that names the toolkit's directory; its `lib` and `lib64` are tried before the system's
/// loader.
pub const HOME_VARIABLE: &str = "CUDA_HOME";

/// How many GPUs the driver has.
///
/// # Errors
/// [`Unavailable`] without the driver's library, and where it finds none.
pub fn gpus() -> Result<usize, CudaError> {
    // SAFETY: loading the driver's library runs its initialisers.
    let present = unsafe { driver::sys::is_culib_present() };
    if !present {
        let why = vec!["the system's loader knows no libcuda.so.1".to_owned()];
        return Err(Unavailable { part: Part::Driver, why }.into());
    }
    let missing = |call: &str, error: driver::DriverError| {
        CudaError::from(Unavailable { part: Part::Gpu, why: vec![format!("{call}: {error}")] })
    };
    driver::result::init().map_err(|e| missing("cuInit", e))?;
    let n = driver::result::device::get_count().map_err(|e| missing("cuDeviceGetCount", e))?;
    match usize::try_from(n) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(Unavailable { part: Part::Gpu, why: vec!["the driver has no device".to_owned()] }.into()),
    }
}

/// Opens the compiler of kernels.
///
/// # Errors
/// [`Unavailable`] with what was tried.
pub fn nvrtc() -> Result<(), CudaError> {
    // SAFETY: loading the library runs its initialisers.
    find(Part::Nvrtc, &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"], || unsafe {
        nvrtc::sys::is_culib_present()
    })
}

/// Opens the library of matrix products.
///
/// # Errors
/// [`Unavailable`] with what was tried.
pub fn cublas_lt() -> Result<(), CudaError> {
    // SAFETY: loading the library runs its initialisers.
    find(Part::CublasLt, &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"], || unsafe {
        cublaslt::sys::is_culib_present()
    })
}

/// Everything that is missing for a run, in order: nothing on a machine that has it all. NCCL is asked for separately.
pub fn missing() -> Vec<Unavailable> {
    let asked = [gpus().map(|_| ()), nvrtc(), cublas_lt()];
    let missing = asked.into_iter().filter_map(|found| match found {
        Err(CudaError::Unavailable(missing)) => Some(missing),
        Ok(()) | Err(_) => None,
    });
    missing.collect()
}

/// Loads the library under [`HOME_VARIABLE`], so that the loader knows it by its name; else lets the loader look.
fn find(part: Part, names: &[&str], present: impl Fn() -> bool) -> Result<(), CudaError> {
    let mut why = Vec::new();
    match env::var_os(HOME_VARIABLE).filter(|home| !home.is_empty()) {
        None => why.push(format!("{HOME_VARIABLE} is not set")),
        Some(home) => {
            let candidates = candidates(Path::new(&home), names);
            if candidates.is_empty() {
                why.push(format!("{} has no lib/{}", Path::new(&home).display(), names[0]));
            }
            for path in candidates {
                if part == Part::Nvrtc {
                    load_builtins(&path);
                }
                // SAFETY: loading runs the library's initialisers; it is the toolkit's, as the user says.
                match unsafe { libloading::Library::new(&path) } {
                    // It stays loaded, for the loader to find it again.
                    Ok(library) => {
                        let _ = ManuallyDrop::new(library);
                        break;
                    }
                    Err(error) => why.push(format!("{}: {error}", path.display())),
                }
            }
        }
    }
    if present() {
        return Ok(());
    }
    why.push(format!("the system's loader knows no {}", names[0]));
    Err(Unavailable { part, why }.into())
}

/// NVRTC opens the library of its built-in functions by its name alone, as the system's loader knows it; so the one beside
/// it is loaded first.
fn load_builtins(nvrtc: &Path) {
    let Some(Ok(entries)) = nvrtc.parent().map(Path::read_dir) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
            // SAFETY: loading runs the library's initialisers; it is the toolkit's, as the user says. Where it fails, NVRTC
            // says so when it compiles.
            if let Ok(library) = unsafe { libloading::Library::new(entry.path()) } {
                let _ = ManuallyDrop::new(library);
            }
        }
    }
}

fn candidates(home: &Path, names: &[&str]) -> Vec<PathBuf> {
    let places = ["lib", "lib64"].map(|directory| home.join(directory));
    let files = places.iter().flat_map(|place| names.iter().map(move |name| place.join(name)));
    files.filter(|path| path.exists()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_what_was_tried() {
        for missing in missing() {
            assert!(!missing.why.is_empty());
            assert!(missing.to_string().contains("not available: "), "{missing}");
            assert!(!missing.part.help().is_empty());
        }
    }

    #[test]
    fn a_home_without_the_library_is_named() {
        let home = tempfile::tempdir().unwrap();
        assert!(candidates(home.path(), &["libnvrtc.so.13"]).is_empty());
    }
}
