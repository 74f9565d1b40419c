//! Detects the CUDA libraries of this machine. cudarc panics where it opens a missing library; the functions here check
//! first.

use std::env;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use cudarc::{cublaslt, driver, nvrtc};

use super::error::{CudaError, Part, Unavailable};

/// The environment variable that names the toolkit's directory; its `lib` and `lib64` are tried before the system's
/// loader.
pub const HOME_VARIABLE: &str = "CUDA_HOME";

/// The number of GPUs that the driver finds.
///
/// # Errors
/// [`Unavailable`] without the driver's library or without a GPU.
pub fn gpus() -> Result<usize, CudaError> {
    // SAFETY: loading the driver's library runs its initialisers.
    let present = unsafe { driver::sys::is_culib_present() };
    if !present {
        let why = vec!["the system's loader does not find libcuda.so.1".to_owned()];
        return Err(Unavailable { part: Part::Driver, why }.into());
    }
    let missing = |call: &str, error: driver::DriverError| {
        CudaError::from(Unavailable { part: Part::Gpu, why: vec![format!("{call}: {error}")] })
    };
    // A queue of the device for each stream: no stream may wait behind a collective of another.
    if env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
        // SAFETY: the standard library's lock guards its own reads, and the driver reads the environment in `cuInit`, below.
        unsafe { env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "16") };
    }
    driver::result::init().map_err(|e| missing("cuInit", e))?;
    let n = driver::result::device::get_count().map_err(|e| missing("cuDeviceGetCount", e))?;
    match usize::try_from(n) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(Unavailable { part: Part::Gpu, why: vec!["the driver has no device".to_owned()] }.into()),
    }
}

/// Opens NVRTC, the kernel compiler.
///
/// # Errors
/// [`Unavailable`] with the paths that were tried.
pub fn nvrtc() -> Result<(), CudaError> {
    // SAFETY: loading the library runs its initialisers.
    find(Part::Nvrtc, &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"], || unsafe {
        nvrtc::sys::is_culib_present()
    })
}

/// Opens cuBLASLt, the library of matrix products.
///
/// # Errors
/// [`Unavailable`] with the paths that were tried.
pub fn cublas_lt() -> Result<(), CudaError> {
    // SAFETY: loading the library runs its initialisers.
    find(Part::CublasLt, &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"], || unsafe {
        cublaslt::sys::is_culib_present()
    })
}

/// All missing parts that a run needs, apart from NCCL.
pub fn missing() -> Vec<Unavailable> {
    let checks = [gpus().map(|_| ()), nvrtc(), cublas_lt()];
    let missing = checks.into_iter().filter_map(|found| match found {
        Err(CudaError::Unavailable(missing)) => Some(missing),
        Ok(()) | Err(_) => None,
    });
    missing.collect()
}

/// Loads the library under [`HOME_VARIABLE`], after which the loader finds it by name; otherwise the loader searches.
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
                // SAFETY: loading runs the initialisers of a library that the user named.
                match unsafe { libloading::Library::new(&path) } {
                    // The library stays loaded, so that the loader finds it by name.
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
    why.push(format!("the system's loader does not find {}", names[0]));
    Err(Unavailable { part, why }.into())
}

/// Loads the library of built-in functions next to NVRTC, because NVRTC opens that library by name alone.
fn load_builtins(nvrtc: &Path) {
    let Some(Ok(entries)) = nvrtc.parent().map(Path::read_dir) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
            // SAFETY: loading runs the initialisers of a library that the user named. NVRTC reports a failure when it
            // compiles.
            if let Ok(library) = unsafe { libloading::Library::new(entry.path()) } {
                let _ = ManuallyDrop::new(library);
            }
        }
    }
}

fn candidates(home: &Path, names: &[&str]) -> Vec<PathBuf> {
    let directories = ["lib", "lib64"].map(|directory| home.join(directory));
    let files = directories.iter().flat_map(|place| names.iter().map(move |name| place.join(name)));
    files.filter(|path| path.exists()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_parts_list_the_attempts() {
        for missing in missing() {
            assert!(!missing.why.is_empty());
            assert!(missing.to_string().contains("not available: "), "{missing}");
            assert!(!missing.part.help().is_empty());
        }
    }

    #[test]
    fn a_home_without_the_library_has_no_candidates() {
        let home = tempfile::tempdir().unwrap();
        assert!(candidates(home.path(), &["libnvrtc.so.13"]).is_empty());
    }
}
