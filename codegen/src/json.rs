//! Schedules as JSON.
