//! Reading and writing files: whole or not at all.

use std::io::Write;
use std::path::{Path, PathBuf};

use ithaca_kernels::store::WholeFile;

use crate::error::{Failure, Result};

/// The text of a file.
///
/// # Errors
/// `C01` when it is missing, cannot be read or is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| Failure::io(&path.display().to_string(), &e))
}

/// Writes a file, of which a reader never sees a part.
///
/// # Errors
/// `C01` when the folder does not exist or cannot be written to.
pub fn write(path: &Path, contents: &[u8]) -> Result<()> {
    let written = WholeFile::create(path).and_then(|mut file| {
        file.write_all(contents)?;
        file.finish()
    });
    written.map_err(|e| Failure::io(&path.display().to_string(), &e))
}

/// Writes several files into a folder, which is made if it does not exist: first all beside, then the renames.
///
/// # Errors
/// `C01` when the folder cannot be made or written to.
pub fn write_all(folder: &Path, files: &[(PathBuf, Vec<u8>)]) -> Result<()> {
    let failed = |path: &Path, e: &std::io::Error| Failure::io(&path.display().to_string(), e);
    let existed = folder.exists();
    std::fs::create_dir_all(folder).map_err(|e| failed(folder, &e))?;
    let result = write_staged(folder, files);
    if result.is_err() && !existed {
        // The folder was made here, and what it was made for failed.
        let _ = std::fs::remove_dir_all(folder);
    }
    result
}

fn write_staged(folder: &Path, files: &[(PathBuf, Vec<u8>)]) -> Result<()> {
    let failed = |path: &Path, e: &std::io::Error| Failure::io(&path.display().to_string(), e);
    let mut staged = Vec::new();
    for (name, contents) in files {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(folder).to_owned();
        std::fs::create_dir_all(&parent).map_err(|e| failed(&parent, &e))?;
        let mut file = WholeFile::create(&path).map_err(|e| failed(&path, &e))?;
        file.write_all(contents).map_err(|e| failed(&path, &e))?;
        staged.push((file, path));
    }
    for (file, path) in staged {
        file.finish().map_err(|e| failed(&path, &e))?;
    }
    Ok(())
}
