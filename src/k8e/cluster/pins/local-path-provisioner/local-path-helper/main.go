// Makes and removes the folder of a volume, on the node that has it: the whole content of the provisioner's helper pod.
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

func run(action, path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || filepath.Dir(path) == "/" {
		return fmt.Errorf("%q is no folder of a volume", path)
	}
	switch action {
	case "create":
		if err := os.MkdirAll(path, 0o777); err != nil {
			return err
		}
		return os.Chmod(path, 0o777) // whatever the umask says: the volume's user is not known
	case "delete":
		return os.RemoveAll(path)
	}
	return fmt.Errorf("%q is neither create nor delete", action)
}

func main() {
	options := map[string]string{}
	for i := 1; i+1 < len(os.Args); i += 2 {
		options[os.Args[i]] = os.Args[i+1]
	}
	if err := run(options["-a"], options["-p"]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
