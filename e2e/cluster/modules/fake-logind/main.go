// Command fake-logind is a fake of systemd-logind on the system bus of a machine without systemd.
// It has what the kubelet's graceful node shutdown uses: delay inhibitors and the announcement of a
// shutdown.
//
//	fake-logind serve      own the name org.freedesktop.login1 until it is terminated
//	fake-logind inhibited  fail unless a client has taken an inhibitor
//	fake-logind shut-down  announce a shutdown, and wait until all inhibitors are released; fail if
//	                       they are not within the maximum delay, after which logind shuts down too
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/godbus/dbus/v5/prop"
)

const (
	service = "org.freedesktop.login1"
	object  = dbus.ObjectPath("/org/freedesktop/login1")
	manager = "org.freedesktop.login1.Manager"

	// control is the interface of the other subcommands.
	control = "dev.tessera.e2e.Logind"

	// maxDelay is InhibitDelayMaxSec, more than the kubelet's configuration asks for: it would
	// otherwise have systemd, which is not there, reload logind.
	maxDelay = 60 * time.Second
)

// logind holds the inhibitors.
type logind struct {
	bus *dbus.Conn

	mutex      sync.Mutex
	inhibitors []inhibitor
	isEnding   bool
}

// inhibitor is a pipe whose write end the caller holds as long as it delays the shutdown.
type inhibitor struct {
	held, ours *os.File
}

// Inhibit returns the file descriptor of a new inhibitor.
func (l *logind) Inhibit(what, who, why, mode string) (dbus.UnixFD, *dbus.Error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if what != "shutdown" || mode != "delay" {
		return 0, dbus.MakeFailedError(fmt.Errorf("unsupported inhibitor of %s by %s: %s", what, who, mode))
	}
	if l.isEnding {
		return 0, dbus.MakeFailedError(errors.New("the shutdown is already under way"))
	}
	held, ours, err := os.Pipe()
	if err != nil {
		return 0, dbus.MakeFailedError(err)
	}
	fmt.Printf("inhibitor of %s: %s\n", who, why)
	l.inhibitors = append(l.inhibitors, inhibitor{held, ours})
	return dbus.UnixFD(ours.Fd()), nil
}

// isReleased returns whether the caller has closed the inhibitor by the deadline. Closes the own
// copy of the write end, which the caller has received by now.
func (i inhibitor) isReleased(deadline time.Time) (bool, error) {
	if err := i.ours.Close(); err != nil {
		return false, err
	}
	if err := i.held.SetReadDeadline(deadline); err != nil {
		return false, err
	}
	_, err := i.held.Read(make([]byte, 1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return false, nil
	}
	if !errors.Is(err, io.EOF) {
		return false, err
	}
	return true, nil
}

// IsInhibited returns whether a client has taken an inhibitor.
func (l *logind) IsInhibited() (bool, *dbus.Error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return len(l.inhibitors) > 0, nil
}

// ShutDown announces a shutdown. It returns whether all inhibitors were released in time.
func (l *logind) ShutDown() (bool, *dbus.Error) {
	l.mutex.Lock()
	l.isEnding = true
	inhibitors := l.inhibitors
	l.inhibitors = nil
	l.mutex.Unlock()
	if err := l.bus.Emit(object, manager+".PrepareForShutdown", true); err != nil {
		return false, dbus.MakeFailedError(err)
	}
	deadline := time.Now().Add(maxDelay)
	for _, inhibitor := range inhibitors {
		released, err := inhibitor.isReleased(deadline)
		if err != nil {
			return false, dbus.MakeFailedError(err)
		}
		if !released {
			return false, nil
		}
	}
	return true, nil
}

func serve(bus *dbus.Conn) error {
	served := &logind{bus: bus}
	methods := map[string]string{"Inhibit": "Inhibit"}
	if err := bus.ExportWithMap(served, methods, object, manager); err != nil {
		return err
	}
	methods = map[string]string{"IsInhibited": "IsInhibited", "ShutDown": "ShutDown"}
	if err := bus.ExportWithMap(served, methods, object, control); err != nil {
		return err
	}
	delay := &prop.Prop{Value: uint64(maxDelay.Microseconds()), Emit: prop.EmitConst}
	properties := prop.Map{manager: {"InhibitDelayMaxUSec": delay}}
	if _, err := prop.Export(bus, object, properties); err != nil {
		return err
	}
	reply, err := bus.RequestName(service, dbus.NameFlagDoNotQueue)
	if err != nil {
		return err
	}
	if reply != dbus.RequestNameReplyPrimaryOwner {
		return fmt.Errorf("%s has another owner", service)
	}
	<-bus.Context().Done()
	return errors.New("the bus has closed the connection")
}

// ask calls a method without arguments, and fails unless it returns true.
func ask(bus *dbus.Conn, method string) error {
	var answer bool
	if err := bus.Object(service, object).Call(control+"."+method, 0).Store(&answer); err != nil {
		return err
	}
	if !answer {
		return fmt.Errorf("%s: no", method)
	}
	return nil
}

func run(arguments []string) error {
	if len(arguments) != 1 {
		return errors.New("usage: fake-logind serve|inhibited|shut-down")
	}
	bus, err := dbus.ConnectSystemBus()
	if err != nil {
		return err
	}
	defer bus.Close()
	switch arguments[0] {
	case "serve":
		return serve(bus)
	case "inhibited":
		return ask(bus, "IsInhibited")
	case "shut-down":
		return ask(bus, "ShutDown")
	}
	return fmt.Errorf("unknown subcommand %q: expected serve, inhibited or shut-down", arguments[0])
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "fake-logind:", err)
		os.Exit(1)
	}
}
