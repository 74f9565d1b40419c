//! Atomic writes: a temporary file in the same folder, then a rename.
//!
//! A rename replaces any file of that name. So a file that is not regular (a device such as `/dev/null`, a named pipe) is
//! written directly, and the target of a symbolic link is replaced, not the link.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::{NamedTempFile, TempPath};

/// A file being written. It appears at its path with [`finish`](Self::finish); dropping it leaves nothing.
#[derive(Debug)]
pub struct WholeFile {
    file: File,
    /// The temporary file with the path that it replaces; absent where that is not regular and is written directly.
    beside: Option<(TempPath, PathBuf)>,
}

impl WholeFile {
    /// Begins a file.
    ///
    /// # Errors
    /// When its folder is missing or cannot be written to, or a folder has its name.
    pub fn create(path: &Path) -> std::io::Result<Self> {
        let Some(path) = place(path)? else {
            return Ok(Self { file: OpenOptions::new().write(true).open(path)?, beside: None });
        };
        let (file, temporary) = beside(&path)?.into_parts();
        Ok(Self { file, beside: Some((temporary, path)) })
    }

    /// Checks before long work that a file can be written to `path`.
    ///
    /// # Errors
    /// As [`create`](Self::create); a file that is not regular is not opened, as a pipe would wait for its reader.
    pub fn check(path: &Path) -> std::io::Result<()> {
        place(path)?.map_or(Ok(()), |path| beside(&path).map(drop))
    }

    /// Flushes the data to the disk, so that a power cut after [`finish`](Self::finish) loses nothing.
    ///
    /// # Errors
    /// When the machine cannot.
    pub fn keep(&self) -> std::io::Result<()> {
        self.beside.as_ref().map_or(Ok(()), |_| self.file.sync_all())
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// When the machine cannot; nothing is left at the path then that was not there before.
    pub fn finish(self) -> std::io::Result<()> {
        let Some((temporary, path)) = self.beside else { return Ok(()) };
        temporary.persist(path).map_err(|e| e.error)
    }
}

/// The largest document that is read whole, bytes.
const MAX_DOCUMENT: u64 = 256 << 20;

/// The text of a document beside tensors, such as an index.
///
/// # Errors
/// When it cannot be read, is too large, or is a device or a pipe.
pub(super) fn read_document(path: &Path) -> std::io::Result<String> {
    let invalid = |why: &str| std::io::Error::new(ErrorKind::InvalidInput, why.to_owned());
    let about = std::fs::metadata(path)?;
    if !about.is_file() && !about.is_dir() {
        return Err(invalid("it is a device or a pipe, and not a file"));
    }
    let mut text = String::new();
    File::open(path)?.take(MAX_DOCUMENT + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_DOCUMENT { Err(invalid("it has more than 256 MiB")) } else { Ok(text) }
}

impl Seek for WholeFile {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.file.seek(to)
    }
}

impl Write for WholeFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// The folder of a path.
pub(super) fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The path that a file written to `path` replaces, with all links resolved; `None` for a device, a pipe or a socket.
fn place(path: &Path) -> std::io::Result<Option<PathBuf>> {
    match std::fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(ErrorKind::IsADirectory.into()),
        Ok(there) if there.is_file() => std::fs::canonicalize(path).map(Some),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == ErrorKind::NotFound => match std::fs::read_link(path) {
            // A link to a path that does not exist yet; circular links are another error.
            Ok(to) => place(&folder(path).join(to)),
            Err(_) => Ok(Some(path.to_owned())),
        },
        Err(error) => Err(error),
    }
}

/// A file in the folder of `path`, with the permissions that its place has or that any new file would.
fn beside(path: &Path) -> std::io::Result<NamedTempFile> {
    let folder = folder(path);
    std::fs::metadata(folder)?;
    let mut builder = tempfile::Builder::new();
    let there = std::fs::metadata(path).map(|there| there.permissions()).ok();
    // Temporary files would be private; new files are readable and writable by all, less the umask of the process.
    if let Some(permissions) = there.or_else(|| permissions(0o666)) {
        builder.permissions(permissions);
    }
    // The reason alone: the name of a temporary file is another every time.
    builder.tempfile_in(folder).map_err(|error| error.kind().into())
}

/// The permissions of a mode; `None` on systems that have other ones.
#[cfg(unix)]
pub(super) fn permissions(mode: u32) -> Option<Permissions> {
    use std::os::unix::fs::PermissionsExt;
    Some(Permissions::from_mode(mode))
}

#[cfg(not(unix))]
pub(super) fn permissions(_mode: u32) -> Option<Permissions> {
    None
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

    use super::*;

    fn write(path: &Path, text: &str) {
        let mut file = WholeFile::create(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.finish().unwrap();
    }

    #[test]
    fn what_is_no_regular_file_is_written_into_and_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        WholeFile::check(&pipe).unwrap();
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read_to_string(pipe).unwrap()
        });
        write(&pipe, "all of it");
        assert_eq!(reader.join().unwrap(), "all of it");
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_stays_one_and_what_it_leads_to_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (link, absent) = (dir.path().join("link"), dir.path().join("to/there"));
        fs::create_dir(dir.path().join("to")).unwrap();
        symlink("to/there", &link).unwrap();
        for text in ["not there before", "there before"] {
            write(&link, text);
            assert_eq!(fs::read_to_string(&absent).unwrap(), text);
            assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        }
    }

    #[test]
    fn a_file_keeps_its_permissions_and_a_folder_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        write(&path, "new");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path) & 0o600, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        write(&path, "newer");
        assert_eq!((mode(&path), fs::read_to_string(&path).unwrap().as_str()), (0o640, "newer"));
        assert_eq!(WholeFile::check(dir.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
    }
}
