#!/bin/bash
# Process 1 of a host: lays its own directories over the machine's, then serves ssh until it is killed.
#   boot.sh NAME DISK OVER SHARED REPOSITORY PYTHON...
# DISK        holds the host's /tmp, /root and logs, and outlives a power cut
# OVER        etc/ and usr/, which are shown over the machine's
# SHARED      what all hosts see at /mnt, like a network file system
# REPOSITORY  is not seen by the host, nor is raytrain installed in its Python
# PYTHON      directories of the Python environment, at the same place in each host
set -eu
name=$1 disk=$2 over=$3 shared=$4 repository=$5
shift 5

hostname "$name"
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
for path in "$disk" "$shared" "$@"; do mkdir -p "/run/kept$path" && mount --rbind "$path" "/run/kept$path"; done
mount -t overlay -o "lowerdir=$over/etc:/etc" etc /etc
mount -t overlay -o "lowerdir=$over/usr:/usr" usr /usr
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs "$repository"
mount --bind "/run/kept$shared" /mnt
mount --bind "/run/kept$disk/root" /root
mount --bind "/run/kept$disk/log" /var/log
mount --bind "/run/kept$disk/tmp" /tmp
for path in "$@"; do mkdir -p "$path" && mount --rbind "/run/kept$path" "$path"; done
mount -t tmpfs tmpfs "$1"/lib/python*/site-packages/raytrain-*.dist-info

cd /
mkdir /run/sshd
/usr/sbin/sshd -f /etc/lab/sshd_config -E /var/log/sshd.log
touch /var/log/booted
while :; do sleep 3600 & wait $! || true; done
